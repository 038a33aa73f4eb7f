"""Whatever the OpenAPI schema allows or forbids: no 5xx, and every answer as it promises."""

import pytest

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")
# Here, before the server's thread imports anything: Python 3.11 fails now and then where two
# threads parse at once ("AST constructor recursion depth mismatch").
not_a_server_error = pytest.importorskip("schemathesis.checks").not_a_server_error
openapi = pytest.importorskip("schemathesis.specs.openapi.checks")
EXAMPLES = 5
STREAMS = ("/api/v1/events", "/api/v1/jobs/{job}/events")


@pytest.mark.slow
def test_the_schema_is_kept(server):
    schema = schemathesis.openapi.from_url(server.url + "/api/v1/openapi.json")
    checks = [
        not_a_server_error,
        openapi.response_schema_conformance,
        openapi.content_type_conformance,
    ]
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in STREAMS:  # they do not end
            continue

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def probe(case):
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=checks, timeout=60)

        probe()
    assert tried >= EXAMPLES * 10
