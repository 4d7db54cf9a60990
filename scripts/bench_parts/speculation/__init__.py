"""`scripts/bench --speculation`: tokens a pass, and what they are worth on simulated Macs."""
