"""Reads the files of a checkpoint as data, without loading weights."""
