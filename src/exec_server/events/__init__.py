"""What people see: the thread / turn / item event stream, written, read, reduced to a state and shown."""
