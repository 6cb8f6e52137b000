"""`python -m redline` is the same as the `redline` command."""

from redline.cli import main

raise SystemExit(main())
