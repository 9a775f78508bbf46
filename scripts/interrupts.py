"""Imported before the packages that take a second: until a script sets its own handler, Ctrl-C ends it without a
traceback."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)
