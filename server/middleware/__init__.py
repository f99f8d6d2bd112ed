"""Pure ASGI middlewares: what holds for every route, before any route is chosen."""
