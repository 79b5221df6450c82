"""``python -m factory``, in whatever folder: its code comes from its own checkout."""

import sys
from pathlib import Path

if not sys.flags.safe_path:  # Python puts the current folder first, which may be a checkout that agents patch
    del sys.path[0]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from factory.cli import main  # noqa: E402

main()
