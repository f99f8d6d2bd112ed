"""Runs before torch is imported here: its idle threads sleep instead of holding a core."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
