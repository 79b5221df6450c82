"""The command ``python -m factory``. From any folder, it runs the code of the checkout that contains this file."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType


def exit_at_signal(number: int, frame: FrameType | None) -> None:
    """End the process at once. While Python still imports the commands, nothing has been started that needs an orderly stop."""
    os.write(2, b"factory: stopped; run the same command again to continue\n")
    os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, exit_at_signal)
    if not sys.flags.safe_path:  # Python puts the current folder first. That may be a checkout that agents patch.
        del sys.path[0]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from factory import cli

    cli.main()


if __name__ == "__main__":
    main()
