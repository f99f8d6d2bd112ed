"""The back ends of the frontend language, which run the requests of programs; one file each."""
