"""What is private in free text, as data: patterns whose group ``x`` is replaced, and patterns that show names.

What only looks private must stay readable: versions of four parts, shapes, ids of cases, paths of packages, hashes of
commits, names of parameters. So a secret is known by its form or by the name that it stands after, never by
being long and random alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_doctor.bundle.private_kinds import PrivateKind
from fsdp_doctor.bundle.secret_forms import SECRET_FORMS


@dataclass(frozen=True)
class Rule:
    """Text of one kind; ``x`` is the group of ``pattern`` that is replaced."""

    kind: PrivateKind
    pattern: re.Pattern[str]


def _rule(kind: PrivateKind, pattern: str, flags: re.RegexFlag = re.NOFLAG) -> Rule:
    return Rule(kind, re.compile(pattern, flags))


_ANY_CASE = re.IGNORECASE
# Where a word begins, also after a line's end that was written as two characters.
BEGIN = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"
_QUOTE = r"\\{0,2}[\"']?"
_IS = rf"{_QUOTE}\s{{0,3}}(?:=>|[:=])\s{{0,3}}{_QUOTE}"
_VALUE = r"(?P<x>[^\s'\"\\,;&}\])]{3,})"
# After a flag.
_WORD = r"(?P<x>[^\s'\"-][^\s'\"]{2,})"
# The end of a name whose value is a secret; what stands before it in the name makes no difference.
_PASSWORD_NAME = r"(?:(?:passw(?:or)?d|passphrase)s?(?:[_-]\w{1,20})?|_pwd)"
_SECRET_NAME = (
    r"(?:(?:secret|credential|(?:api|access|account|private|signing|auth|encryption|license|webhook)[_-]?key)s?"
    r"(?:[_-]\w{1,20})?)"
)
_TOKEN_NAME = (
    r"(?<![A-Za-z0-9])(?:hf|hub|auth|access|api|bearer|session|refresh|id|gh|github|gitlab|wandb|security|personal"
    r"|oauth|registry|npm|slack|jwt|csrf|vault|databricks|neptune|kaggle|sas|user|pypi|docker|aws|job|bot|deploy)"
    r"[_-]?token"
)
_HEX = "[0-9a-f]"

_UUID = rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"

# Of secrets those with a form come first, so that a name before them does not make them something vaguer.
RULES: tuple[Rule, ...] = (
    _rule(
        "private key",
        r"(?P<x>-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:.{0,16000}?-----END [A-Z ]{0,40}-----|[^\n]*(?:\n[^\n]{1,200}){0,80}))",
        re.DOTALL,
    ),
    # Of a key whose beginning was cut off: whole lines of base64.
    _rule(
        "private key",
        r"^[^\S\n]{0,8}(?:\[[^\]\n]{1,40}\]:? ?)?"
        r"(?P<x>(?=\S{0,79}[a-z])(?=\S{0,79}[A-Z])(?=\S{0,79}\d)[A-Za-z0-9+/]{60,80}={0,2})$",
        re.MULTILINE,
    ),
    _rule("public SSH key", r"\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\w+) (?P<x>AAAA[A-Za-z0-9+/=]{16,})"),
    *(_rule(kind, rf"{BEGIN}(?P<x>{form})") for kind, form in SECRET_FORMS.items()),
    _rule("webhook", r"hooks\.slack\.com/\w+/(?P<x>[\w/]+)"),
    _rule("webhook", r"discord(?:app)?\.com/api/webhooks/(?P<x>[\w/-]+)"),
    _rule("webhook", r"webhook\.office\.com/(?P<x>[^\s'\"]+)"),
    _rule("webhook", r"/(?:bot/v2/hook|robot/send\?access_token=|webhook/send\?key=)/?(?P<x>[\w-]+)"),
    _rule("Azure key", rf"\b(?:AccountKey|SharedAccessKey){_IS}{_VALUE}"),
    _rule(
        "secret in a URL",
        r"(?:[?&]|SharedAccessSignature=)[\w.-]*(?:token|key|secret|sig(?:nature)?|password|credential)[\w-]*=(?P<x>[^\s&#'\"<>]+)",
        _ANY_CASE,
    ),
    _rule(
        "authorization header",
        rf"\b(?:proxy-)?authorization{_IS}(?:(?:bearer|basic|token|digest|negotiate)\s+)?{_VALUE}",
        _ANY_CASE,
    ),
    _rule("authorization header", r"\b(?:bearer|basic)\s+(?P<x>(?=[^\s'\"]*\d)[\w.~+/=-]{12,})", _ANY_CASE),
    _rule("cookie", rf"\b(?:set-)?cookie{_IS}(?P<x>[^\n'\"]{{4,}})", _ANY_CASE),
    _rule("credentials in a URL", r"\b[a-z][a-z0-9+.-]{1,20}://(?!git@)(?P<x>[^\s/@'\"<>]{1,400})@", _ANY_CASE),
    _rule("password", r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(?P<x>\S+)"),
    _rule("password", r"\bsshpass\s+-p\s*(?P<x>\S+)"),
    _rule("password", r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)\s+(?P<x>\S+:\S+)"),
    _rule("Docker token", rf"\bauth{_IS}(?P<x>[A-Za-z0-9+/]{{12,}}={{0,2}})(?=[\"'])"),
    _rule(
        "named key or secret", rf"\busername{_IS}[\w.-]{{1,40}}{_QUOTE},\s{{0,3}}{_QUOTE}key{_IS}(?P<x>{_HEX}{{32}})"
    ),
    _rule("Weights & Biases key", r"\bwandb\s+login\s+(?:--\S+\s+)*(?P<x>[\w-]{16,})"),
    _rule("Weights & Biases key", rf"\bWANDB_API_KEY{_IS}{_VALUE}"),
    _rule("AWS key", rf"\baws_?(?:secret_?access_?key|session_?token){_IS}{_VALUE}", _ANY_CASE),
    _rule("Azure key", rf"\bAZURE_\w{{0,40}}?(?:KEY|SECRET|TOKEN){_IS}{_VALUE}"),
    _rule("password", rf"{_PASSWORD_NAME}{_IS}{_VALUE}", _ANY_CASE),
    _rule("password", rf"--[\w-]{{0,40}}?{_PASSWORD_NAME}\s+['\"]?{_WORD}", _ANY_CASE),
    _rule("named token", rf"(?<![\w.])token{_IS}(?P<x>(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{{16,}})", _ANY_CASE),
    _rule("named token", r"--(?:hf[_-])?token[=\s]\s*['\"]?(?P<x>[^\s'\"-][^\s'\"]{5,})", _ANY_CASE),
    _rule("named token", rf"{_TOKEN_NAME}{_IS}{_VALUE}", _ANY_CASE),
    _rule("named token", rf"--[\w-]{{0,40}}?{_TOKEN_NAME}\s+['\"]?{_WORD}", _ANY_CASE),
    # Of a tokenizer, too, there are such names, but no such values.
    _rule("named token", rf"\b[A-Z][A-Z0-9_]{{0,40}}_TOKEN{_IS}(?P<x>(?=[\w.-]*\d)(?=[\w.-]*[A-Za-z])[\w.-]{{8,}})"),
    _rule("named key or secret", rf"{_SECRET_NAME}{_IS}{_VALUE}", _ANY_CASE),
    _rule("named key or secret", rf"--[\w-]{{0,40}}?{_SECRET_NAME}\s+['\"]?{_WORD}", _ANY_CASE),
    _rule(
        "e-mail address", r"(?<![\w.+-])(?P<x>(?!git@)[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24})(?![\w@])"
    ),
    _rule("bucket", r"\b(?:s3[an]?|gs|gcs|abfss?|wasbs?|az|oss|cos|r2|hdfs|tos)://(?P<x>[^\s/'\",)]+)"),
    _rule("bucket", r"//(?:s3[\w.-]{0,30}\.amazonaws|storage\.googleapis)\.com/(?P<x>[a-z0-9][\w.-]{2,62})"),
    _rule("bucket", r"\barn:aws[\w-]{0,10}:s3:::(?P<x>[\w.-]+)"),
    _rule("cloud account", r"\barn:aws[\w-]{0,10}:[\w-]{0,30}:[\w-]{0,20}:(?P<x>\d{12})"),
    _rule("cloud account", r"\b(?P<x>\d{12})(?=\.dkr\.ecr\.)"),
    _rule("MAC address", rf"(?<![\w:])(?P<x>(?:{_HEX}{{2}}[:-]){{5}}{_HEX}{{2}})(?![\w:-])", _ANY_CASE),
    _rule("MAC address", rf"(?<![\w.])(?P<x>(?=[\d.]{{0,13}}[a-f]){_HEX}{{4}}\.{_HEX}{{4}}\.{_HEX}{{4}})(?![\w.])"),
    _rule("device id", rf"\b(?P<x>(?:GPU|MIG|NIC)-{_UUID})"),
    _rule("device id", rf"\b(?:gpu|device)?[ _-]?uuid{_IS}(?P<x>{_UUID})", _ANY_CASE),
    _rule(
        "serial number",
        r"\bserial(?:[ _-]?(?:number|no))?[\"']?\s{0,40}[:=]\s{0,3}[\"']?(?P<x>(?=\w*\d)\w{6,})",
        _ANY_CASE,
    ),
    _rule("network path", r"(?<![\w\\:])\\{2,4}(?P<x>[A-Za-z][\w.-]{2,62}\\{1,2}[\w.$-]{2,62})(?=\\)"),
    _rule(
        "home directory",
        r"(?:(?<![\w.~-])|(?<=\\[nrt]))(?P<x>(?:/[\w.-]+){0,3}?/(?:home|homes|Users|users|scratch|fsx)/[^\s/'\"\\,:;()\[\]{}<>]+)",
    ),
    _rule("home directory", r"(?P<x>\b[A-Za-z]:\\{1,2}Users\\{1,2}[^\s\\/'\",:;]+)"),
    _rule("home directory", r"(?<![\w./-])(?P<x>/root)(?![\w.-])"),
    _rule("home directory", r"(?<![\w./])(?P<x>~[a-z][\w-]+)(?=/)"),
    _rule("user name", r"\bwandb\.ai/(?P<x>[\w-]+)(?=/)"),
    _rule("user name", r"\bSLURM_JOB_ACCOUNT=(?P<x>[\w.-]+)"),
)

_HOST = r"(?P<x>[A-Za-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,8}|\d{1,6}(?:-\d{1,6}){0,6}-[A-Za-z][\w.-]{0,99})"
_NUMBERED_HOST = r"(?P<x>(?=[\w.-]{0,99}[\d-])[A-Za-z][\w-]{1,62}(?:\.[\w-]{1,63}){0,8})"
_LINES = re.MULTILINE

# Where a host is named; its name is then replaced wherever it stands.
HOSTS: tuple[re.Pattern[str], ...] = (
    re.compile(
        r"\b(?:master[_-]addr|(?:local[_-])?host[_-]?name|rdzv[_-]endpoint|submit_host|nodename|cluster[_ ]?name)"
        rf"{_IS}{_HOST}",
        _ANY_CASE,
    ),
    re.compile(rf"--(?:master[_-]addr|rdzv[_-]endpoint|hostname|nodelist|host)[=\s]\s*{_HOST}(?![\w=])"),
    re.compile(r"\bSLURM\w*(?:NODELIST|NODE_LIST|HOST|NODENAME)=(?P<x>[^\s,]+)"),
    re.compile(rf"\b(?:host|node|server|machine|endpoint|address|peer){_IS}{_NUMBERED_HOST}", _ANY_CASE),
    re.compile(r"^[^\S\n]*host[^\S\n]+:[^\S\n]+(?P<x>\S+)", _LINES),
    re.compile(r"\bhost (?P<x>[A-Za-z]\w{0,30}-[\w-]{0,30}\d[\w.-]{0,30})"),
    re.compile(
        rf"\b(?:on|from|at|to|of|by) (?:the )?(?:host|node|machine|server|worker node) {_NUMBERED_HOST}", _ANY_CASE
    ),
    re.compile(rf"(?<![\w.-]){_HOST}:\d+:\d+ \[\d+\] NCCL"),
    re.compile(rf"\[{_HOST}\]:\d{{2,5}}\b"),
    re.compile(rf"\b(?:tcp|gloo|nccl|ray|grpc|ssh|nfs)://(?:[^\s/@]+@)?{_HOST}"),
    re.compile(rf"\bsrun: error: {_HOST}: task"),
    re.compile(rf"\bslurmstepd: error: [^\n]*? ON {_HOST} CANCELLED"),
    re.compile(rf"\b[a-z_][\w.-]{{0,31}}@{_HOST}(?=:[~/]|\s+[~/]\S*[\])]?[$#%]|\][$#])"),
    re.compile(rf"\b(?:ssh|scp|rsync)\s[^\n]{{0,80}}?[\w.-]{{1,64}}@{_HOST}"),
    re.compile(r"\b[a-z][\w.-]{1,31}@(?P<x>(?!v\d)[A-Za-z]{2,20}-?\d{1,5})(?![\w.-])"),
    re.compile(rf"^{_HOST} slots=\d", _LINES),
    re.compile(rf"\bLinux {_HOST} \d+\.\d+\.\d+"),
    re.compile(rf"^[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d {_HOST} [\w.-]+(?:\[\d+\])?:", _LINES),
    re.compile(r"\bmachine\s+(?P<x>\S+)\s+login\s"),
    re.compile(rf" AAAA[A-Za-z0-9+/=]{{16,}} [\w.-]{{1,64}}@{_HOST}"),
)

_NAME = r"(?P<x>[A-Za-z][\w.-]{1,31})"

# Where a user is named; the name is then replaced wherever it stands.
USERS: tuple[re.Pattern[str], ...] = (
    re.compile(rf"\b(?:\w+_)?(?:USER|USERNAME|LOGNAME|USERID){_IS}{_NAME}"),
    re.compile(rf"\b(?:user_?name|login_?name|entity){_IS}{_NAME}"),
    re.compile(rf"(?:/home|/homes|/Users|/users|/scratch|/fsx|:\\{{1,2}}Users\\{{1,2}})[/\\]?{_NAME}"),
    re.compile(rf"(?<![\w./])~{_NAME}(?=/)"),
    re.compile(rf"\b{_NAME}@(?!v\d)[A-Za-z]{{2,20}}-?\d{{1,5}}(?![\w.-])"),
    re.compile(rf"\b(?:user|UserId)={_NAME}"),
    re.compile(rf"^[^\S\n]*User(?:name)?:[^\S\n]+{_NAME}$", _LINES),
    re.compile(rf"\b[Ll]ogged in as:? {_NAME}"),
    re.compile(rf"\blogin {_NAME} password\b"),
    re.compile(rf"\b{_NAME}@[A-Za-z][\w.-]*(?=:[~/]|\s+[~/]\S*[\])]?[$#%]|\][$#])"),
    re.compile(rf"\b(?:ssh|scp|rsync)\s[^\n]{{0,80}}?\b{_NAME}@"),
    re.compile(rf" AAAA[A-Za-z0-9+/=]{{16,}} {_NAME}@"),
    re.compile(rf"\b[ug]id=\d+\({_NAME}\)"),
    re.compile(rf"^[dl-][rwxsStT-]{{9}}[.+@]? +\d+ {_NAME} ", _LINES),
    re.compile(rf"\bwandb\.ai/{_NAME}/"),
    re.compile(rf"\bsudo: +{_NAME} :"),
)

# Names that say nothing of anybody, and words that a log needs.
NOBODY = re.compile(
    r"root|ubuntu|users?|admin|administrator|runner|jovyan|nobody|ray|vscode|app|work|workers?|node|git|docker|centos"
    r"|debian|azureuser|ec2-user|shared|public|data|datasets|models?|torch|train|training|tests?|default|none|null|true"
    r"|false|str|string|local|main|python|conda|venv|miniconda3|anaconda3|cache|tmp|opt|home|projects?|code|src"
    r"|checkpoints|rank|master|host|localhost|cuda|gpu|cpu|nccl|gloo|self|with|the|and|for|from|name",
    re.IGNORECASE,
)
# The value of a name is no secret where it is one of these, or code.
NOT_SECRET = re.compile(
    r"(?:true|false|none|null|nil|str|\d{1,6}|<.*|\*+|x{3,}|\.{2,}.*|\$.*|%.*|your.*|required|optional|set|unset|missing"
    r"|(?:os|self|args|cfg|config|kwargs|settings|options|params|env)[.\[].*|[a-z_]+\(.*|\[redacted.*)",
    re.IGNORECASE,
)
PUBLIC_HOSTS = re.compile(
    r"(?:.*\.)?(?:github\.com|githubusercontent\.com|github\.io|huggingface\.co|hf\.co|pytorch\.org|pypi\.org|python\.org"
    r"|pythonhosted\.org|arxiv\.org|stackoverflow\.com|nvidia\.com|readthedocs\.io|wikipedia\.org|google\.com"
    r"|googleapis\.com|anaconda\.(?:com|org)|conda\.io|wandb\.ai|slack\.com|discord(?:app)?\.com|office\.com|ray\.io"
    r"|kernel\.org|gnu\.org|apache\.org|localhost|json-schema\.org|w3\.org|docker\.(?:io|com)|ghcr\.io|gcr\.io"
    r"|quay\.io|modelscope\.(?:cn|ai)|lightning\.ai|openai\.com|tensorflow\.org|numpy\.org)",
    re.IGNORECASE,
)
