"""What the files of a checkpoint hold, read as data and without loading weights."""
