"""The C++ library behind the `cpu` implementations: sources, build, ctypes binding."""
