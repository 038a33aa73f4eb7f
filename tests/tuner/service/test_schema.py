"""Fuzz tests of the service: any request, allowed by the OpenAPI schema or not, gets an answer that matches
the schema, and never a 5xx status.

``EBBTIDE_FUZZ=200`` sends that many requests to each route (5,000 in all). The slowest one is printed.
"""

import gc
import os

import pytest

hypothesis = pytest.importorskip("hypothesis")
EXAMPLES = int(os.environ.get("EBBTIDE_FUZZ", "5"))
STREAMS = ("/api/v1/events", "/api/v1/jobs/{job}/events")


@pytest.mark.slow
def test_the_schema_is_kept(server):
    # Objects that earlier tests left emit warnings now. During an import, a warning would be shown with a traceback,
    # which Python 3.11 cannot parse: "AST constructor recursion depth mismatch".
    gc.collect()
    schemathesis = pytest.importorskip("schemathesis")  # imported here, because the import takes a second
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    schema = schemathesis.openapi.from_url(server.url + "/api/v1/openapi.json")
    checks = [not_a_server_error, response_schema_conformance, content_type_conformance]
    seconds, failures = [], []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in STREAMS:  # streams do not end
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
            response = case.call(timeout=60)
            seconds.append((response.elapsed, case.method, case.path, case.body))
            case.validate_response(response, checks=checks)

        try:
            probe()
        except Exception as failure:  # the other routes are tried anyway
            failures.append(f"{operation.method} {operation.path}: {failure!r} {failure}"[:2000])
    print(len(seconds), "requests; the slowest:", *sorted(seconds, key=lambda row: row[0])[-3:], sep="\n")
    assert not failures, "\n\n".join(failures)
    assert len(seconds) >= EXAMPLES * 10
