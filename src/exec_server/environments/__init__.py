"""Which machine: from a name, a URL or a command to something that runs processes."""
