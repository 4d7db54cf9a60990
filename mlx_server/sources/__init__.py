"""Where the files of models come from: folders, the hub, other programs, transcripts."""
