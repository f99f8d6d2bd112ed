"""The native API's routes, one file per group; each makes its own router from the context."""
