"""The frontend language: programs of prompts and generations, run against any back end."""
