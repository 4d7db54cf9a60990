"""One model over several processes: rank 0 is the engine process, and the others repeat its steps.

All ranks run the same engine. What differs is where its inputs come from: commands, clock readings
and whether a background task has ended. Rank 0 records each input as it reads it, and the others
read the same ones in the same order from their standard input; see README.md in `worker`.
"""
