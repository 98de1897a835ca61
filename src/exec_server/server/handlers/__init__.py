"""What a server does for each family of methods. One module per family, imported on first use."""
