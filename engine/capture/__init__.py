"""Stage *capture*: what a step changed -> the engine's lane (`steps`), and the device handlers that find and move it."""

from engine.capture.steps import Capture, Cursor

__all__ = ["Capture", "Cursor"]
