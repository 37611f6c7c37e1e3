"""The entries of the table, a file for each kind of object that they are about."""
