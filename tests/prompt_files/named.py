"""Files of a group of prompts in small blocks."""

import numpy as np

from mlx_server.prompt_files.names import Ids, group_of

BLOCK = 4
GROUP = group_of("m")


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.uint32)
