"""All limits on resources that a client can make grow.

Code that enforces a limit reads its value from here; SECURITY.md shows them as a table, which a
test checks. A limit that models.yaml can change has its default here and names its setting.
"""

from mlx_server.limits.answers import *
from mlx_server.limits.background import *
from mlx_server.limits.checkpoints import *
from mlx_server.limits.connections import *
from mlx_server.limits.grammars import *
from mlx_server.limits.limit import Limit as Limit
from mlx_server.limits.logs import *
from mlx_server.limits.mcp import *
from mlx_server.limits.page import *
from mlx_server.limits.pdf import *
from mlx_server.limits.requests import *
from mlx_server.limits.store import *
from mlx_server.limits.templates import *
from mlx_server.limits.testing import *
from mlx_server.limits.upstream import *
from mlx_server.limits.web_sockets import *
