"""Crashes the image decoder process on a PNG of 101 x 101 pixels, as some real files have done."""

import os
import signal
import sys

if "runtime.media.image_process" in sys.orig_argv:
    from PIL import PngImagePlugin

    _load = PngImagePlugin.PngImageFile.load

    def _crash(self: PngImagePlugin.PngImageFile) -> object:
        if self.size == (101, 101):
            os.kill(os.getpid(), signal.SIGSEGV)
        return _load(self)

    PngImagePlugin.PngImageFile.load = _crash
