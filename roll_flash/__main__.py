"""Run `roll-flash` as `python -m roll_flash`."""

import sys

from roll_flash.cli.main import main

sys.exit(main())
