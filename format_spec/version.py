"""The version of the bytes; the package's own version is `teachercache.__version__`."""

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
FORMAT_VERSION = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
