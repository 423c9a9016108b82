"""Makes `scripted_runner` importable from the tests of this folder, wherever pytest is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
