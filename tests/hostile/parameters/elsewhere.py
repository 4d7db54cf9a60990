"""Of the owner: what models.yaml says of a model that another server has, or several machines."""

from collections.abc import Mapping

from mlx_server.config import hostfile, settings
from mlx_server.upstream.spec import UpstreamCapabilities, UpstreamPolicy

REQUESTS, FAILURES = "tests/upstream/test_request_body.py", "tests/upstream/test_failures.py"
CONNECTION = "tests/upstream/test_connection_limits.py"
HANDED_BACK = "tests/upstream/test_reasoning_details.py"
BUDGET = "tests/upstream/test_limited_thoughts.py"
WATSONX = "tests/upstream/test_credentials_watsonx.py"
REFUSED = f"{REQUESTS}::test_what_can_not_be_passed_on_is_refused_by_name"
ITS_ROLES = f"{REQUESTS}::test_messages_keep_their_roles_and_no_content_is_null"
LISTED = f"{REQUESTS}::test_what_has_no_effect_is_listed"
WAITING = f"{CONNECTION}::test_how_long_an_upstream_is_waited_for_unless_the_owner_says"
SILENCE = f"{CONNECTION}::test_silence_before_and_within_an_answer"
GROUPS, HOSTFILE = "tests/config/test_distributed.py", "tests/config/test_hostfile.py"
OF_A_GROUP = f"{GROUPS}::test_hosts_are_a_file_or_a_list_and_groups_have_ports_one_after_the_other"
ITS_FORM = f"{HOSTFILE}::test_the_object_form_has_a_backend_variables_and_devices"

OF_UPSTREAMS: Mapping[str, str] = {
    "upstream_model": f"{REQUESTS}::test_only_what_was_said",
    "api_key_env": f"{FAILURES}::test_the_key_is_sent_and_nothing_of_the_client",
    "project_id": f"{WATSONX}::test_one_token_serves_many_requests",
    "space_id": f"{WATSONX}::test_a_space_and_a_choice_of_tools",
    "iam_url": f"{WATSONX}::test_one_token_serves_many_requests",
    "fallback": f"{FAILURES}::test_the_first_fallback_that_answers",
}
"""Of ModelSettings."""

ELSEWHERE: Mapping[type, Mapping[str, str]] = {
    UpstreamPolicy: {
        "connect_seconds": WAITING,
        "first_seconds": SILENCE,
        "idle_seconds": SILENCE,
        "answer_seconds": f"{CONNECTION}::test_an_answer_without_end_in_time",
        "retries": f"{CONNECTION}::test_so_many_attempts",
        "empty_retries": f"{REQUESTS}::test_an_empty_answer_is_asked_for_again",
    },
    UpstreamCapabilities: {
        "images": "tests/upstream/test_messages.py::test_images_are_passed_on_to_a_model_that_sees",
        "tools": f"{REQUESTS}::test_tools_for_a_model_without_them",
        "tool_choice": f"{REQUESTS}::test_a_call_that_is_required_is_asked_for_again",
        "tool_messages": f"{REQUESTS}::test_calls_and_results_as_text",
        "reasoning_messages": ITS_ROLES,
        "developer_role": ITS_ROLES,
        "json_schema": f"{REQUESTS}::test_a_schema_for_a_model_that_knows_none",
        "structured_outputs": REFUSED,
        "chat_template_kwargs": LISTED,
        "continue_message": f"{REQUESTS}::test_a_message_is_continued_where_that_can_be",
        "sampling": REFUSED,
        "max_tokens_field": f"{REQUESTS}::test_what_the_owner_says_where_the_client_does_not",
    },
    settings.DistributedSettings: {
        "hosts": OF_A_GROUP,
        "mode": OF_A_GROUP,
        "port": OF_A_GROUP,
        "memory": OF_A_GROUP,
        "python": "tests/worker/ranks/test_leader.py::test_the_owner_names_its_python",
    },
    hostfile.Hostfile: {"hosts": ITS_FORM, "backend": ITS_FORM, "envs": ITS_FORM},
    hostfile.Host: {
        "ssh": f"{HOSTFILE}::test_a_list_of_hosts_is_read_in_the_order_of_ranks",
        "ips": f"{HOSTFILE}::test_a_list_of_hosts_is_read_in_the_order_of_ranks",
        "rdma": ITS_FORM,
    },
}
