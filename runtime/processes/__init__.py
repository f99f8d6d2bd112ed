"""The engine's processes, seen from the front: started, watched, started again."""
