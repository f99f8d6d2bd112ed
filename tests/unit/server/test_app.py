"""How routes get into the application."""

import httpx
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response

from server.app import _include


async def test_a_guard_of_a_route_or_its_router_holds():
    async def forbid() -> None:
        raise HTTPException(403)

    async def answer(request: Request) -> Response:
        return Response(await request.body())

    guarded = APIRouter(dependencies=[Depends(forbid)])
    guarded.add_api_route("/router", answer, methods=["POST"])
    router = APIRouter()
    router.add_api_route("/route", answer, methods=["POST"], dependencies=[Depends(forbid)])
    router.add_api_route("/open", answer, methods=["POST"])
    api = FastAPI()
    for each in (guarded, router):
        _include(api, each)
    transport = httpx.ASGITransport(app=api)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        answers = [await client.post(path, content=b"x") for path in ("/router", "/route", "/open")]
    assert [each.status_code for each in answers] == [403, 403, 200]
    assert answers[-1].content == b"x"
