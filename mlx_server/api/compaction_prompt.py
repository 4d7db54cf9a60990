"""What asks the model for a summary that takes the place of a conversation."""

SUMMARIZE = (
    "Our conversation has become too long. Summarise all of it for somebody who will go on with "
    "it and can't read it: what was asked for, what was found out, decided and done, with the "
    "names, numbers, paths and results that matter, and what is left to do. Write only the summary."
)
