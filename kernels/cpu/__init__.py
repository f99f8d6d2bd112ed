"""The C++ library of the `cpu` implementations: sources, build and ctypes binding."""
