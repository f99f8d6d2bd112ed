"""The native API's routes, one file per group; each creates its own router from the context."""
