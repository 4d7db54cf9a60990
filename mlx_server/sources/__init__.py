"""The sources of model files: folders, the hub, other programs' folders, transcripts."""
