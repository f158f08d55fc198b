"""Write a record of processing activities (LGPD Art. 37, GDPR Art. 30) from a run, with blanks to fill in.

A run folder shows which requests clients got, what they sent, what is stored and how it was protected. Responsible
persons, legal bases and locations are not in it: those lines are left blank.

It is written in English or in Portuguese.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mutirao.core.arrays import fingerprint
from mutirao.core.exclusion import parse_names
from mutirao.core.fleet import failure_of
from mutirao.deploy.policy.policy_templates import EXTRAS, METRICS, REQUESTS
from mutirao.errors import ConfigError
from mutirao.experiments.task import NAMES, find
from mutirao.runs.audit_trail import check_chain
from mutirao.runs.execute import reopen
from mutirao.runs.reader import Record
from mutirao.runs.trust import Trust, distrust
from mutirao.runs.unlearning import RECORD, ROUNDS
from mutirao.systems.recsys.consent import EVALUATED, POOLED

Words = Mapping[str, str]

ENGLISH = {
    "title": "Record of processing",
    "notice": "Written from the run by `mutirao record`, for LGPD Art. 37 and GDPR Art. 30(1). What a run cannot know "
    "is left **to fill in**. This is no legal advice.",
    "blank": "**to fill in**",
    "period": "Period",
    "rounds": "rounds",
    "yes": "yes",
    "no": "no",
    "# responsible": "Who is responsible (GDPR 30(1)(a), LGPD 5 VI to VIII)",
    "# purpose": "Purpose and legal basis (GDPR 30(1)(b), LGPD 6 I, 7, 11)",
    "# subjects": "Data subjects and categories of data (GDPR 30(1)(c))",
    "# leaves": "What leaves a client",
    "# recipients": "Recipients and transfers (GDPR 30(1)(d), (e); LGPD 33)",
    "# retention": "Retention (GDPR 30(1)(f), LGPD 15, 16)",
    "# measures": "Security measures (GDPR 30(1)(g) and 32, LGPD 46)",
    "# withdrawals": "Withdrawals (GDPR 7(3) and 17, LGPD 8 § 5 and 18)",
    "# digests": "Digests (sha256)",
    "controller": "Controller, with contact",
    "operator": "Processor (operator), who runs the server",
    "officer": "Data protection officer (encarregado)",
    "stated": "Purpose, as communicated to the data subjects",
    "basis": "Legal basis of each controller",
    "recipe": "What was trained",
    "subjects_are": "Data subjects",
    "users": "the users of a recommender, each a client",
    "searchers": "people who search, each a client",
    "client_is": "the run folder does not show which people a client's data are about",
    "clients": "Clients: {clients}, of which {replied} were asked",
    "which": "Categories of data",
    "ratings": "which items a user rated, how, and when",
    "slides": "pictures of cells and their labels: health data",
    "queries": "queries, documents and relevance labels",
    "digits": "a public set of pictures, partitioned among simulated clients",
    "sensitive": "Special categories (GDPR 9, LGPD 5 II)",
    "pooled": "Pooled at one place by consent: the data of {pooled} people (digest of their ids `{digest}`)",
    "stays": "Raw data stay with the clients; what follows are all possible requests and answers, by name. An "
    "update without noise can give data back: see Security measures.",
    "not_known": "Not known here, since the run's data could not be read again",
    "requests": "Asked",
    "extras": "Sent besides the model",
    "metrics": "Figure",
    "arrays": "The model, or the rows of it that a client worked on",
    "unsaid": "of that name",
    "bytes": "Sent in all: {bytes_up} bytes from the clients, {bytes_down} to them",
    "server": "The server, and who runs it",
    "model_goes": "Every client that is asked receives the model, or the rows of it that it works on",
    "abroad": "Transfers to other countries",
    "simulated": "nothing in the trail shows sites of their own: it looks like a simulation on one machine",
    "kept": "Models kept: {models} of single rounds, the best: {best}; {bytes} bytes with what resuming needs",
    "files": "Files",
    "named": "`clients.csv`, the roster and `forget.json` hold the clients' ids: pseudonymous, so personal, data",
    "until": "Date of erasure, and person responsible",
    "privacy": "Differential privacy",
    "secure": "Secure aggregation",
    "compress": "Compression",
    "screen": "Filter against false updates",
    "spent": "Privacy spent",
    "download": "Rows of the model that are sent (`touched`: those a user names, which reveals what it rated)",
    "trail_is": "Audit trail: {events} events, {whole}",
    "whole": "its chain of hashes is whole",
    "altered": "its chain of hashes is BROKEN in {faults} places; see `mutirao verify`",
    "transport": "Encryption on the way (TLS, keys), and the sites' policies",
    "access": "Who may log in, backups, encryption at rest",
    "excluded": "Clients that withdrew and take no part in this run: {excluded}; their ids are in `config.toml`",
    "had_part_in": "The last one had part in",
    "first_contribution": "First round it contributed to",
    "rounds_kept": "Rounds kept",
    "rounds_redone": "Rounds made again",
    "digest_before": "Model before",
    "digest_after": "Model after",
    "config": "Configuration",
    "model": "Final model",
    "trail": "Head of the audit trail",
    "None": "–",
}

PORTUGUESE = {
    "title": "Registro de operações de tratamento",
    "notice": "Escrito a partir da execução por `mutirao record`, para o art. 37 da LGPD e o art. 30(1) do GDPR. O que "
    "a execução não pode saber fica **a preencher**. Isto não é parecer jurídico.",
    "blank": "**a preencher**",
    "period": "Período",
    "rounds": "rodadas",
    "yes": "sim",
    "no": "não",
    "# responsible": "Quem responde (LGPD 5 VI a VIII, GDPR 30(1)(a))",
    "# purpose": "Finalidade e base legal (LGPD 6 I, 7, 11; GDPR 30(1)(b))",
    "# subjects": "Dados de quem, e quais (GDPR 30(1)(c))",
    "# leaves": "O que sai de um cliente",
    "# recipients": "Destinatários e transferências (LGPD 33; GDPR 30(1)(d), (e))",
    "# retention": "Retenção (LGPD 15, 16; GDPR 30(1)(f))",
    "# measures": "Medidas de segurança (LGPD 46; GDPR 30(1)(g) e 32)",
    "# withdrawals": "Revogações (LGPD 8 § 5 e 18; GDPR 7(3) e 17)",
    "# digests": "Digests (sha256)",
    "controller": "Controlador, com contato",
    "operator": "Operador, que mantém o servidor",
    "officer": "Encarregado (DPO)",
    "stated": "Finalidade, como foi dita aos titulares",
    "basis": "Base legal de cada controlador",
    "recipe": "O que foi treinado",
    "subjects_are": "Titulares",
    "users": "os usuários de um recomendador, cada um um cliente",
    "searchers": "pessoas que fazem buscas, cada uma um cliente",
    "client_is": "a execução não sabe de quem são os dados de um cliente",
    "clients": "Clientes: {clients}, dos quais {replied} foram consultados",
    "which": "Categorias de dados",
    "ratings": "que itens um usuário avaliou, como e quando",
    "slides": "imagens de células e seus rótulos: dados de saúde",
    "queries": "consultas, documentos e julgamentos de relevância",
    "digits": "um conjunto público de imagens, repartido entre clientes simulados",
    "sensitive": "Dados sensíveis (LGPD 5 II, GDPR 9)",
    "pooled": "Reunidos num só lugar por consentimento: os dados de {pooled} pessoas (digest dos ids `{digest}`)",
    "stays": "Os dados brutos ficam com os clientes; o que segue é tudo o que lhes pode ser pedido e o que podem "
    "dizer, pelo nome. Uma atualização sem ruído pode devolver dados: veja Medidas de segurança.",
    "not_known": "Não se sabe aqui, pois os dados da execução não puderam ser lidos de novo",
    "requests": "Pedido",
    "extras": "Dito além do modelo",
    "metrics": "Número",
    "arrays": "O modelo, ou as linhas dele em que um cliente trabalhou",
    "unsaid": "com esse nome",
    "bytes": "Enviados ao todo: {bytes_up} bytes dos clientes, {bytes_down} para eles",
    "server": "O servidor, e quem o mantém",
    "model_goes": "Todo cliente consultado recebe o modelo, ou as linhas dele em que trabalha",
    "abroad": "Transferências internacionais",
    "simulated": "nada na trilha mostra sites próprios: parece uma simulação numa só máquina",
    "kept": "Modelos guardados: {models} de rodadas, o melhor: {best}; {bytes} bytes com o que é preciso para retomar",
    "files": "Arquivos",
    "named": "`clients.csv`, a lista de clientes e `forget.json` têm os ids dos clientes: são dados pseudonimizados, "
    "portanto pessoais",
    "until": "Eliminados até, e por quem",
    "privacy": "Privacidade diferencial",
    "secure": "Agregação segura",
    "compress": "Compressão",
    "screen": "Filtro contra atualizações falsas",
    "spent": "Privacidade gasta",
    "download": "Linhas do modelo enviadas (`touched`: as que o usuário nomeia, o que diz o que avaliou)",
    "trail_is": "Trilha de auditoria: {events} eventos, {whole}",
    "whole": "com a cadeia de hashes íntegra",
    "altered": "com a cadeia de hashes ROMPIDA em {faults} lugares; veja `mutirao verify`",
    "transport": "Cifragem no caminho (TLS, chaves), e as políticas dos sites",
    "access": "Quem pode entrar, cópias de segurança, cifragem em repouso",
    "excluded": "Clientes que revogaram e não têm parte nesta execução: {excluded}; os ids estão em `config.toml`",
    "had_part_in": "O último tinha parte em",
    "first_contribution": "Primeira rodada para a qual contribuiu",
    "rounds_kept": "Rodadas mantidas",
    "rounds_redone": "Rodadas refeitas",
    "digest_before": "Modelo antes",
    "digest_after": "Modelo depois",
    "config": "Configuração",
    "model": "Modelo final",
    "trail": "Topo da trilha de auditoria",
    "None": "–",
    ROUNDS: "as rodadas",
    POOLED: "aqueles cujas avaliações reunidas dão início aos vetores dos itens",
    EVALUATED: "aqueles que julgam o modelo",
    "requests.train": "uma atualização do modelo, feita com os dados do cliente",
    "requests.evaluate": "como o modelo vai no que o cliente guarda: os números abaixo",
    "requests.probe": "o mesmo em poucas amostras, antes de ser escolhido para uma rodada",
    "requests.agree": "se o cliente tem o que todos combinaram: sim ou não, e nenhum número",
    "requests.rows": "de que linhas do modelo precisa: na recomendação, que itens o usuário avaliou",
    "requests.profile": "de cada coluna contagens, média, dispersão e categorias comuns, antes da primeira rodada",
    "requests.warm": "como o modelo muda com os dados do cliente, numa assinatura curta com que se formam grupos",
    "requests.fit": "como vai um modelo ajustado aos dados do cliente, que fica com ele",
    "requests.take": "um modelo do grupo, que fica com o cliente, se chega atrasado",
    "extras.items": "os números dos itens que o usuário avaliou",
    "extras.signature": "a resposta ao aquecimento",
    "extras.holdings": "que classes o cliente tem, sim ou não cada uma, às claras",
    "extras.profile": "a resposta ao pedido desse nome",
    "extras.squared_errors": "o erro de CADA amostra no modelo enviado",
    "extras.batch_sizes": "como esses erros se repartem em lotes",
    "extras.control": "o gradiente de TODAS as amostras no modelo enviado, menos o anterior",
    "metrics.loss": "perda média nas amostras usadas",
    "metrics.accuracy": "fração delas que está certa",
    "metrics.entropy": "quão indeciso está o modelo, em média",
    "metrics.epsilon": "privacidade gasta até aqui; não diz nada dos dados",
    "metrics.epsilon_next": "privacidade a que mais uma rodada levaria; não diz nada dos dados",
}

WORDS: Mapping[str, Words] = {"en": ENGLISH, "pt": PORTUGUESE}


MEASURES = ("privacy", "secure", "compress", "screen")
# Recipes in which a client is a person; of others the run does not know.
PEOPLE = {"recsys": "users", "online": "searchers"}
DATA = {
    "recsys": "ratings",
    "cytology": "slides",
    "ranking": "queries",
    "online": "queries",
    "quickstart": "digits",
    "selection": "digits",
    "cifar10": "digits",
}
WITHDRAWN = ("had_part_in", "first_contribution", "rounds_kept", "rounds_redone", "digest_before", "digest_after")


def record_facts(folder: Path, trust: Trust = distrust) -> dict[str, Any]:
    """The facts of a run folder for the record; None or empty where they are missing."""
    record = Record.begun(folder)
    name, config = reopen(None, folder, [], trust)
    events, faults = check_chain(folder / "audit.jsonl")
    times = [str(event.get("time", "")) for event in events]
    settings = {key: getattr(config, key) for key in MEASURES}
    rounds = [event for event in events if event.get("event") == "round"]
    # Only sites report the head of a trail or versions of their own; simulated clients have neither.
    networked = any(event.get("heads") or event.get("site_versions") for event in rounds)
    data = getattr(config, "data", "")
    return {
        "run": folder.name,
        "recipe": name,
        "about": NAMES[name][1] if name in NAMES else None,
        "begun": times[0] if times else None,
        "last": times[-1] if times else None,
        "rounds": record.rounds,
        "subjects": {"kind": PEOPLE.get(name), "clients": record.population, "replied": len(record.participation()[0])},
        "data": {"kind": DATA.get(name), "source": Path(data).name if isinstance(data, str) and data else None},
        "pooled": pooled_by_consent(record, events),
        "leaves": what_leaves(name, config, folder),
        "bytes": {key: record.summary.get(key) for key in ("bytes_up", "bytes_down")},
        "networked": networked,
        "kept": what_is_kept(folder),
        "measures": {key: {"name": part.name, **part.settings} for key, part in settings.items()},
        "download": getattr(config, "download", None),
        "spent": record.summary.get("privacy"),
        "trail": {"events": len(events), "faults": faults},
        "withdrawn": withdrawals(folder, config.exclude),
        "digests": {
            "config": fingerprint(record.text),
            "model": record.summary.get("digest"),
            "trail": events[-1]["hash"] if events else None,
        },
    }


def pooled_by_consent(record: Record, events: list[dict[str, Any]]) -> Any:
    """What a run records of data that were pooled by consent: in its summary, or else when it began."""
    if not events:
        return None
    return record.summary.get("consent") or events[0].get("facts", {}).get("consent")


def what_leaves(recipe: str, config: Any, folder: Path) -> dict[str, Any]:
    """All requests to clients and all that they may send with these settings; without the data, why it is unknown."""
    try:
        found = find(recipe)
        task = found.prepare(config)
        exchange = found.disclosure(config, task)
        arrays = {k: list(v.shape) for k, v in task.initial().items()}
    except Exception as error:  # the data may be elsewhere by now, and reading them may raise anything
        return {"unknown": failure_of(error).reason[:200]}
    return {
        "requests": list(exchange.requests),
        "arrays": arrays,
        "extras": list(exchange.extras),
        "metrics": list(exchange.metrics),
    }


def what_is_kept(folder: Path) -> dict[str, Any]:
    """Models of rounds, tables and their sizes: all that somebody would have to erase."""
    models = sorted((folder / "checkpoints").glob("*.safetensors"))
    tables = [f.name for f in sorted(folder.iterdir()) if f.is_file() and not f.name.startswith(".")]
    states = [f for f in (folder / "checkpoints").rglob("*") if f.is_file()]
    return {
        "models": sum(f.name.startswith("round_") for f in models),
        "best": any(f.name == "best.safetensors" for f in models),
        "bytes": sum(f.stat().st_size for f in states),
        "files": tables,
    }


def withdrawals(folder: Path, exclude: str) -> dict[str, Any]:
    """How many clients withdrew, and what the last withdrawal changed; their names stay in the folder."""
    try:
        forgotten = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        forgotten = None
    last = None
    if isinstance(forgotten, Mapping) and forgotten:
        last = {key: forgotten.get(key) for key in WITHDRAWN}
    return {"excluded": len(parse_names(exclude)), "last": last}


def write_record(facts: Mapping[str, Any], lang: str) -> str:
    """The record as Markdown, in English (`en`) or Portuguese (`pt`)."""
    if lang not in WORDS:
        raise ConfigError(f"lang: {lang!r} is none of {', '.join(WORDS)}")
    words = WORDS[lang]
    return "\n".join([*heading(facts, words), *sections(facts, words), ""])


def heading(facts: Mapping[str, Any], w: Words) -> Iterable[str]:
    """The title, the notice and the period."""
    yield f"# {w['title']}: {facts['run']}"
    yield ""
    yield w["notice"]
    yield ""
    yield f"{w['period']}: {facts['begun'] or '?'} – {facts['last'] or '?'}, {facts['rounds']} {w['rounds']}"


def sections(facts: Mapping[str, Any], w: Words) -> Iterable[str]:
    """A section for each item that the articles require."""
    blank = w["blank"]
    abroad = f"{w['abroad']}: {blank}"
    if not facts["networked"]:
        abroad += in_brackets(w["simulated"])
    content = {
        "responsible": [f"{w[who]}: {blank}" for who in ("controller", "operator", "officer")],
        "purpose": [
            f"{w['stated']}: {blank}",
            f"{w['basis']}: {blank}",
            f"{w['recipe']}: `{facts['recipe']}`{in_brackets(facts['about'])}",
        ],
        "subjects": subjects(facts, w),
        "leaves": leaves(facts["leaves"], facts["bytes"], w),
        "recipients": [
            f"{w['server']}: {blank}",
            w["model_goes"],
            abroad,
        ],
        "retention": retention(facts["kept"], w),
        "measures": measures(facts, w),
        "withdrawals": withdrawn(facts["withdrawn"], w),
        "digests": [f"{w[key]}: {in_code(value)}" for key, value in facts["digests"].items()],
    }
    for name, lines in content.items():
        yield ""
        yield f"## {w[f'# {name}']}"
        yield ""
        yield from (f"- {line}" for line in lines)


def in_brackets(text: str | None) -> str:
    """A text as an addition to a line; nothing if there is none."""
    if text:
        return f" ({text})"
    return ""


def in_code(text: str | None) -> str:
    """A text as code in Markdown; a dash if there is none."""
    if text:
        return f"`{text}`"
    return "–"


def subjects(facts: Mapping[str, Any], w: Words) -> list[str]:
    """Data subjects, and categories of data."""
    people = facts["subjects"]
    data = facts["data"]
    pooled = facts["pooled"]
    kind = w["blank"] + in_brackets(w["client_is"])
    if people["kind"]:
        kind = w[people["kind"]]
    lines = [f"{w['subjects_are']}: {kind}", w["clients"].format(**people)]
    lines.append(f"{w['which']}: {w[data['kind'] or 'blank']}")
    if data["source"]:
        lines[-1] += in_brackets(in_code(data["source"]))
    lines.append(f"{w['sensitive']}: {w['blank']}")
    if pooled:
        lines.append(w["pooled"].format(**pooled))
    return lines


def leaves(found: Mapping[str, Any], sent: Mapping[str, Any], w: Words) -> list[str]:
    """The requests to clients, and what they send."""
    if "unknown" in found:
        return [f"{w['not_known']}: {found['unknown']}"]
    lines = [w["stays"]]
    for key, table in (("requests", REQUESTS), ("extras", EXTRAS), ("metrics", METRICS)):
        for name in found[key]:
            lines.append(f"{w[key]} `{name}`: {w.get(f'{key}.{name}') or table.get(name) or w['unsaid']}")
    shapes = ", ".join(f"`{name}` {'×'.join(map(str, shape))}" for name, shape in found["arrays"].items())
    lines.append(f"{w['arrays']}: {shapes}")
    if sent["bytes_up"] is not None:
        lines.append(w["bytes"].format(**sent))
    return lines


def retention(kept: Mapping[str, Any], w: Words) -> list[str]:
    """What is stored in the folder, and until when."""
    return [
        w["kept"].format(models=kept["models"], best=w["yes"] if kept["best"] else w["no"], bytes=kept["bytes"]),
        f"{w['files']}: {', '.join(f'`{name}`' for name in kept['files'])}",
        w["named"],
        f"{w['until']}: {w['blank']}",
    ]


def measures(facts: Mapping[str, Any], w: Words) -> list[str]:
    """What protected the run, as far as its configuration and its trail say."""
    lines = []
    for kind, part in facts["measures"].items():
        own = ", ".join(f"{k}={v}" for k, v in part.items() if k != "name")
        lines.append(f"{w[kind]}: `{part['name']}`{in_brackets(own)}")
    if facts["spent"]:
        spent = ", ".join(f"{k}={v}" for k, v in facts["spent"].items())
        lines.append(f"{w['spent']}: {spent}")
    if facts["download"]:
        lines.append(f"{w['download']}: `{facts['download']}`")
    faults = facts["trail"]["faults"]
    whole = w["whole"]
    if faults:
        whole = w["altered"].format(faults=len(faults))
    lines.append(w["trail_is"].format(events=facts["trail"]["events"], whole=whole))
    transport = w["simulated"]
    if facts["networked"]:
        transport = w["blank"]
    lines.append(f"{w['transport']}: {transport}")
    lines.append(f"{w['access']}: {w['blank']}")
    return lines


def withdrawn(found: Mapping[str, Any], w: Words) -> list[str]:
    """How many withdrew and what was done."""
    lines = [w["excluded"].format(**found)]
    if found["last"]:
        lines += [f"{w[key]}: {w.get(str(value)) or value}" for key, value in found["last"].items()]
    return lines
