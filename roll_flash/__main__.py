"""`python -m roll_flash` is the `roll-flash` command."""

import sys

from roll_flash.cli.main import main

sys.exit(main())
