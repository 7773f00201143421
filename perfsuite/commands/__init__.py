"""What the ``perfsuite`` command's subcommands do, one file each."""
