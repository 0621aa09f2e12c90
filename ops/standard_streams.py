"""Standard input, output and error, which whoever starts a command may have closed. Runs first thing in the command's process."""

from __future__ import annotations

import os
import sys


def fill_in() -> None:
    """Open /dev/null in place of each that is closed: else the next file that is opened gets its number, and what is printed goes there.

    Children inherit them.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))
