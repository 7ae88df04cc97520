"""The first evening: a small real teacher and real text, imported by the command line only."""
