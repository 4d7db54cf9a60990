"""Of the owner: what models.yaml says of a model that another server has, or several machines."""

from collections.abc import Mapping

from mlx_server.config import hostfile, settings
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamPolicy

REQUESTS, FAILURES = "tests/upstream/test_request_body.py", "tests/upstream/test_failures.py"
CONNECTION = "tests/upstream/test_connection_limits.py"
HANDED_BACK = "tests/upstream/test_reasoning_details.py"
BUDGET = "tests/upstream/test_limited_thoughts.py"
WATSONX = "tests/upstream/test_credentials_watsonx.py"
SILENCE = f"{CONNECTION}::test_silence_before_and_within_an_answer"
GROUPS, HOSTFILE = "tests/config/test_distributed.py", "tests/config/test_hostfile.py"
OF_A_GROUP = f"{GROUPS}::test_hosts_are_a_file_or_a_list_and_groups_have_ports_one_after_the_other"
ITS_FORM = f"{HOSTFILE}::test_the_object_form_has_a_backend_variables_and_devices"

OF_UPSTREAMS: Mapping[str, str] = {
    "upstream_model": f"{REQUESTS}::test_only_what_was_said",
    "api_key_env": f"{FAILURES}::test_the_key_is_sent_and_nothing_of_the_client",
    "project_id": f"{WATSONX}::test_one_token_serves_many_requests",
    "space_id": f"{WATSONX}::test_a_space_and_a_choice_of_tools",
    "fallback": f"{FAILURES}::test_the_first_fallback_that_answers",
}
"""Of ModelSettings."""

ELSEWHERE: Mapping[type, Mapping[str, str]] = {
    UpstreamPolicy: {
        "first_seconds": SILENCE,
        "retries": f"{CONNECTION}::test_so_many_attempts",
    },
    UpstreamCapabilities: {
        "images": "tests/upstream/test_messages.py::test_images_are_passed_on_to_a_model_that_sees",
        "tools": f"{REQUESTS}::test_tools_for_a_model_without_them",
        "json_schema": f"{REQUESTS}::test_a_schema_for_a_model_that_knows_none",
    },
    settings.DistributedSettings: {
        "hosts": OF_A_GROUP,
        "mode": OF_A_GROUP,
        "port": OF_A_GROUP,
        "python": "tests/worker/ranks/test_leader.py::test_the_owner_names_its_python",
    },
    hostfile.Hostfile: {"hosts": ITS_FORM, "backend": ITS_FORM, "envs": ITS_FORM},
    hostfile.Host: {
        "ssh": f"{HOSTFILE}::test_a_list_of_hosts_is_read_in_the_order_of_ranks",
        "ips": f"{HOSTFILE}::test_a_list_of_hosts_is_read_in_the_order_of_ranks",
        "rdma": ITS_FORM,
    },
}
