"""The forms of well-known tokens and keys, which give them away under any name.

A form is more than a prefix: ``sk-learn-contrib``, ``hf_model_name_or_path``, ``Asia-Pacific-region`` and the name of a volcano
are words. So each prefix has its case, and what must follow it.
"""

from __future__ import annotations

__all__ = ["NAMED", "SIGNS", "TOKENS"]

TOKENS = r"""
    (?-i: (?<![A-Za-z0-9])
        (?: sk- (?= [\w-]{0,40} [A-Za-z0-9]{16} ) [\w-]{16,}  # OpenAI, Anthropic and others
        | [rs]k_ (?: live | test ) _ [A-Za-z0-9]{16,}  # Stripe
        | hf_ [A-Za-z0-9]{20,} | api_org_ [A-Za-z0-9]{20,}  # Hugging Face
        | gh[oprsu]_ [A-Za-z0-9]{20,} | github_pat_ \w{20,} | glpat- [\w-]{16,}
        | xox[abeprs]- [\w-]{12,} | https://hooks\.slack\.com/services/ [\w/]{12,}
        | (?: AKIA | ASIA ) [A-Z0-9]{16} (?! [A-Za-z0-9] )  # the id of a key of AWS
        | AIza [\w-]{30,} | ya29\. [\w-]{20,}  # Google
        | npm_ [A-Za-z0-9]{30,} | pypi-AgE [\w-]{16,} | dckr_pat_ [\w-]{20,}
        | nvapi- [\w-]{20,} | gsk_ [A-Za-z0-9]{20,} | r8_ [A-Za-z0-9]{30,} | SG\. [\w-]{16,} \. [\w-]{16,}
        | \d{8,10}:AA [\w-]{30,}  # Telegram
        | eyJ [\w-]{8,} \. [\w.-]{8,}  # a JSON web token
        | (?<= [?&]sig= ) [\w%+/=-]{20,}  # the signature of a link of Azure
        )
    )
"""
"""Part of a verbose regular expression without groups: matches a token."""

_OPTION = r"--? [\w-]{0,24} (?: token | passw (?: or )? d | passphrase | secret | api -? key ) [\w-]{0,24}"
_HEADER = (
    r"(?: x - )? (?: authorization | cookie | set - cookie | api - key | auth -? token | passw (?: or )? d | secret )"
)
_FIELD = r"(?: pass | pw | pin | otp | jwt | dsn | credentials | auth | x - api - key | csrf -? token )"

NAMED = rf"""
      (?P<option> (?<! [\w-] ) {_OPTION} ["'] , \s{{0,3}} b? ["'] ) [^"']+  # in the list of the parts of a command
    | (?P<spoken> (?<! [\w-] ) {_OPTION} \s{{1,3}} ) (?= [^\s0-9"']{{0,100}} \d ) [^\s"']{{7,}}  # in a command
    | (?P<login> (?<! \S ) (?: -u | --user | --proxy-user ) \s{{1,3}} [^\s:"']{{1,100}} : ) (?! \d+ (?! [^\s"'] ) ) [^\s"']+
    | (?P<pair> \( b? ["'] {_HEADER} ["'] , \s{{0,3}} b? ["'] ) [^"']+ (?= ["'] \) )  # name and value of a header
    | (?P<field> ["'] {_FIELD} ["'] \s{{0,3}} : \s{{0,3}} b? ["'] ) [^"']+  # in a dictionary, or in JSON
"""
"""Part of a verbose regular expression: matches a secret after its name. The groups match what says where the secret is."""

SIGNS = (
    *("sk-", "k_live_", "k_test_", "hf_", "api_org_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-"),
    *(
        "xox",
        "hooks.slack",
        "akia",
        "asia",
        "aiza",
        "ya29",
        "npm_",
        "pypi-",
        "dckr_pat_",
        "nvapi-",
        "gsk_",
        "r8_",
        "sg.",
    ),
    *(":aa", "eyj", "sig="),
    *("'pass'", "'pw'", "'pin'", "'otp'", "'jwt'", "'dsn'", "'auth'", "credentials", "-u ", "--user "),
    *('"pass"', '"pw"', '"pin"', '"otp"', '"jwt"', '"dsn"', '"auth"', "--proxy-user "),
)
"""In small letters: a text with none of these has no such token, nor a secret after a name that no other expression knows."""
