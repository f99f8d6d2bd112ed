"""Options of the server, and configurations of its processes. Importable without torch."""
