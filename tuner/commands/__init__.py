"""The subcommands of ``tune``, each in its own file."""
