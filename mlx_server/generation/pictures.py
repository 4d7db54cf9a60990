"""Shows a model the pictures of a conversation.

Each is decoded in a process with limits, once for all turns of its conversation, and gets the
placeholder that the model's chat templates write for a picture. In the rendered prompt, the one
image token of each placeholder becomes as many as the picture has, with the picture's own ids.

A picture of the newest question that can't be shown is refused. One of the history is a line of
text instead: its client sends it again with each turn.
"""

import base64
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from mlx_server import limits
from mlx_server.engine.messages import FIRST_MEDIA_ID, Picture, media_ids
from mlx_server.errors import BadRequest
from mlx_server.messages import (
    NOT_TEXT,
    ContentPart,
    Conversation,
    Media,
    Message,
    PicturePart,
    content_of,
)
from mlx_server.models.tokenizer import Tokenizer
from mlx_server.models.vision import Borrowed, Vision
from mlx_server.prompts.branches import Branches
from mlx_server.prompts.template_prompt import RenderedPrompt
from mlx_server.request_threads import check_wanted
from mlx_server.system.sandbox.files import FileRefused, decoded, processed
from mlx_server.system.sandbox.picture_recipes import PictureRecipe, Size

SHOWN_ROLES = ("user", "tool")
"""The roles of messages whose pictures are shown: templates have no place for others."""


@dataclass(frozen=True)
class ShownPicture:
    digest: bytes
    sizes: list[Size]
    pixels: bytes
    ids: Sequence[int] = ()
    """Its tokens, if a borrowed processor has made them; then it has no sizes."""


_Shown = tuple[bytes, PictureRecipe, int, Borrowed | None]
"""The digest of a picture's file, and how it is shown."""


class DecodedPictures:
    """The pictures that were decoded last."""

    def __init__(self) -> None:
        self._pictures = OrderedDict[_Shown, ShownPicture]()
        self._lock = threading.Lock()
        self._nbytes = 0

    def picture(self, data: str, vision: Vision, detail: str | None) -> ShownPicture:
        """data: base64. Raises FileRefused, and PicturesUnavailable."""
        recipe = vision.shown(detail)
        borrowed = vision.recipe if isinstance(vision.recipe, Borrowed) else None
        key = sha256(data.encode(errors="surrogatepass")).digest(), recipe, vision.filter, borrowed
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
                return self._pictures[key]
        picture = _decoded(data, recipe, vision.filter)
        if borrowed:
            picture = _processed(picture, borrowed)
        with self._lock:
            if key not in self._pictures:
                self._pictures[key] = picture
                self._nbytes += len(picture.pixels)
            while self._nbytes > limits.DECODED_PICTURE_BYTES:
                _, dropped = self._pictures.popitem(last=False)
                self._nbytes -= len(dropped.pixels)
        return picture


def _decoded(data: str, recipe: PictureRecipe, filter: int) -> ShownPicture:
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError:
        raise FileRefused("is not base64") from None
    sizes, pixels = decoded(file, recipe, filter)
    head = b"".join(b"%d %d " % size for size in sizes)
    return ShownPicture(sha256(head + pixels).digest(), sizes, pixels)


def _processed(picture: ShownPicture, recipe: Borrowed) -> ShownPicture:
    reply, inputs = processed(recipe.folder, recipe.stamp, picture.sizes[0], picture.pixels)
    if len(reply.ids) > limits.PICTURE_TOKENS:
        raise FileRefused(f"has {len(reply.ids)} tokens; the limit is {limits.PICTURE_TOKENS}")
    return ShownPicture(picture.digest, [], inputs, reply.ids)


DECODED = DecodedPictures()


def with_pictures(
    conversation: Conversation, vision: Vision
) -> tuple[Conversation, list[ShownPicture]]:
    """The conversation with placeholders for the pictures that can be shown, and these."""
    messages = list(conversation.messages)
    given = [
        (at, place, part)
        for at, message in enumerate(messages)
        if message.role in SHOWN_ROLES
        for place, part in enumerate(message.parts)
        if isinstance(part, Media) and part.kind == "image"
    ]
    newest = _newest(messages)
    asked = (at >= newest and bool(part.place) for at, _, part in given)
    if (count := sum(asked)) > limits.PICTURES:
        raise BadRequest(
            f"The question has {count} pictures; the limit is {limits.PICTURES}. Leave some out.",
            param="messages",
        )
    pictures: list[ShownPicture] = []
    parts = {at: list(messages[at].parts) for at, *_ in given}
    for number, (at, place, medium) in enumerate(given):
        check_wanted()
        if len(given) - number > limits.PICTURES:
            part: ContentPart = replace(medium, why="later messages have too many pictures")
        else:
            part = _part(medium, vision, pictures, is_new=at >= newest)
        parts[at][place] = part
    for at, shown in parts.items():
        messages[at] = replace(messages[at], parts=tuple(shown), content=content_of(shown))
    return replace(conversation, messages=tuple(messages)), pictures


def _part(
    medium: Media, vision: Vision, pictures: list[ShownPicture], *, is_new: bool
) -> ContentPart:
    """The placeholder of a picture, which is added to the others, or the line in its place."""
    try:
        data, detail = _data(medium)
        pictures.append(DECODED.picture(data, vision, detail))
    except FileRefused as refused:
        if is_new and medium.place:
            raise BadRequest(f"The picture {refused}.", param=medium.place) from None
        return replace(medium, why=f"it {refused}")
    return PicturePart(vision.family.placeholder, vision.text)


def _data(medium: Media) -> tuple[str, str | None]:
    """The base64 of a picture, and the detail that is asked for."""
    if medium.why != NOT_TEXT:
        raise FileRefused(medium.why)
    source = (medium.part or {}).get("image_url")
    url = source.get("url") if isinstance(source, dict) else None
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not head[:5].lower() == "data:":
        raise FileRefused(
            "is not sent with the request: send it as a data: URL, or have the server's owner list "
            "its host in `server.picture_hosts`"
        )
    if not head.lower().endswith(";base64"):
        raise FileRefused("is not base64")
    return data, source.get("detail") if isinstance(source, dict) else None


def _newest(messages: Sequence[Message]) -> int:
    """The place of the first of the messages since the last answer."""
    answers = (at for at, each in enumerate(messages, 1) if each.role not in SHOWN_ROLES)
    return max(answers, default=0)


def expanded(
    rendered: RenderedPrompt, pictures: Sequence[ShownPicture], vision: Vision, tokenizer: Tokenizer
) -> RenderedPrompt | None:
    """The prompt with all tokens of its pictures. None if the template has not written each
    placeholder once, or not before all text where all tokens see each other."""
    places = [at for at, token in enumerate(rendered.tokens) if token == vision.token]
    if len(places) != len(pictures):
        return None
    context = b""
    if pictures and vision.sees_whole == "prompt":
        if places[0]:
            return None
        whole = b"".join(each.digest for each in pictures) + repr(rendered.tokens).encode()
        context = sha256(whole).digest()
    tokens: list[int] = []
    placed: list[Picture] = []
    added = [0]
    """The tokens by which the prompt is longer after each number of pictures."""
    begin = 0
    for at, each in zip(places, pictures, strict=True):
        tokens += rendered.tokens[begin:at]
        count, texts = _tokens(each, vision, tokenizer)
        digest = each.digest + context
        picture = Picture(len(tokens), digest, count, each.sizes, each.pixels, texts)
        placed.append(picture)
        tokens += media_ids(digest, count)
        begin = at + 1
        added.append(added[-1] + count - 1)
    tokens += rendered.tokens[begin:]
    if context and (others := len(tokens) - placed[0].tokens) > limits.PREFIX_TOKENS:
        raise BadRequest(
            f"The prompt has {others} tokens besides its first picture's; the limit of a model "
            f"whose tokens all see each other is {limits.PREFIX_TOKENS}. Shorten it.",
            param="messages",
        )

    def moved(length: int) -> int:
        return length + added[bisect_left(places, length)]

    def branches() -> Branches:
        found = rendered.branches()
        lengths = tuple(map(moved, found.places))
        return Branches(lengths, moved(found.continued_from), moved(found.shared))

    return replace(rendered, tokens=tokens, pictures=tuple(placed), branches=branches)


def _tokens(
    picture: ShownPicture, vision: Vision, tokenizer: Tokenizer
) -> tuple[int, list[tuple[int, int]]]:
    """How many tokens a picture has, and the places of those of text among them."""
    if picture.ids:
        texts = [(place, id) for place, id in enumerate(picture.ids) if id != vision.token]
        return len(picture.ids), texts
    count, texts = 0, []
    for part in vision.layout(picture.sizes):
        if isinstance(part, str):
            ids = tokenizer.encode(part)
            texts += enumerate(ids, count)
            count += len(ids)
        else:
            count += part
    return count, texts


def with_vocabulary(prompt: RenderedPrompt, token: int) -> list[int]:
    """The prompt's tokens with ids of the vocabulary in place of those of pictures. token: the
    image token."""
    tokens = [id if id < FIRST_MEDIA_ID else token for id in prompt.tokens]
    for picture in prompt.pictures:
        for place, id in picture.texts:
            tokens[picture.at + place] = id
    return tokens
