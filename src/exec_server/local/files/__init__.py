"""The files of this machine. Everything here may block; `lane` says in which order and on which thread."""
