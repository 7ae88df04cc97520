"""The engine that runs a teacher with vLLM: the only sub-package that imports it."""
