"""python recipes/ray_serve.py 2 8000 MODEL...: models behind one address, http://127.0.0.1:8000/v1, served by so many
replicas of Ray Serve, on as many machines as its cluster has.

Each replica is a server of its own, with pages of its own. Requests whose header X-Session-Id is the same go to the
same replica, which has stored what the session said before; others to any.
"""

import sys

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def main(replicas: str, port: str, *models: str) -> None:
    def ingress() -> FastAPI:  # in each replica
        from headway.cli.serve import OWN, ServerRun
        from headway.serve.app import make_app

        return make_app(ServerRun([*models]).open(), hosts=OWN)

    deployment = serve.deployment(
        serve.ingress(ingress)(),
        name="headway",
        num_replicas=int(replicas),
        max_ongoing_requests=256,  # those that a server writes together
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    serve.run(deployment.bind(), blocking=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
