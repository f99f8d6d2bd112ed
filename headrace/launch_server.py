"""`python -m headrace.launch_server`: an alias of `python -m server.launch`."""

from __future__ import annotations

from server.launch import main

if __name__ == "__main__":
    main()
