"""What the tests use to look at the server from outside. Imports nothing of exec_server."""
