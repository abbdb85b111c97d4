"""The words the generated world is written with.

Data only: nothing here draws at random. Values that a chain hands on (`MARKS`) must each be one
token of the reference tokenizer when they follow a space; `training/tokenizer.py` checks that.
"""

MARKS: tuple[str, ...] = tuple(
    """amber copper silver violet green white black blue red yellow ivory pearl jade ruby coral
    olive iron stone oak pine maple rose lily fern moss wolf bear hawk owl fox crane star moon sun
    wave river flame frost storm anchor crown""".split()
)

# shown where a chain document hands a value on without naming it
NEUTRAL = "unchanged"
MARK_KINDS: tuple[str, ...] = ("seal", "badge", "flag", "signal")
SITES: tuple[str, ...] = tuple(
    """Mill Gate Tower Bridge Hall Yard Dock Lodge Farm Station Harbour House Works Barn
    Store""".split()
)

KIN: tuple[str, ...] = tuple(
    """sister brother mother father uncle aunt cousin manager deputy neighbour teacher assistant
    friend partner tutor landlord""".split()
)
TRADES: tuple[str, ...] = tuple(
    """baker carpenter painter doctor farmer sailor printer teacher gardener driver lawyer nurse
    miller tailor weaver cook smith guard clerk librarian plumber builder fisher hunter
    potter surveyor translator mechanic dentist pharmacist""".split()
)
INSTRUMENTS: tuple[str, ...] = tuple(
    "flute violin piano drum harp horn guitar cello trumpet organ lute fiddle".split()
)
DAYS: tuple[str, ...] = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTHS: tuple[str, ...] = tuple(
    """January February March April May June July August September October November
    December""".split()
)

# verb in the third person, past participle
DUTY_VERBS: tuple[tuple[str, str], ...] = (
    ("signs", "signed"), ("approves", "approved"), ("checks", "checked"), ("keeps", "kept"),
    ("files", "filed"), ("prints", "printed"), ("orders", "ordered"), ("counts", "counted"),
    ("collects", "collected"), ("repairs", "repaired"), ("reviews", "reviewed"),
    ("stamps", "stamped"), ("sends", "sent"), ("cleans", "cleaned"), ("pays", "paid"),
    ("plans", "planned"), ("writes", "written"), ("sorts", "sorted"), ("issues", "issued"),
    ("handles", "handled"), ("opens", "opened"), ("renews", "renewed"),
)  # fmt: skip
TOPIC_FIRST: tuple[str, ...] = tuple(
    """travel budget leave night shed office visitor safety harbour archive summer winter field
    garden supply training parking library staff guest kitchen annual weekly monthly urgent
    project building vehicle internal external medical equipment""".split()
)
TOPIC_LAST: tuple[str, ...] = tuple(
    """requests reports permits keys forms invoices orders passes letters records lists plans
    contracts badges parcels tickets claims notes files tools bills licences maps
    accounts""".split()
)

ROOMS: tuple[str, ...] = tuple(
    """archive library kitchen workshop laboratory canteen garage office studio chapel press
    bakery clinic museum stable greenhouse mailroom cellar vault darkroom""".split()
)
ROOM_FIRST: tuple[str, ...] = tuple(
    "old new main small large upper lower north south east west second public private".split()
)
SPOTS: tuple[str, ...] = tuple(
    """wing floor tower court yard hall basement attic annex corridor block terrace""".split()
)
EVENTS: tuple[str, ...] = tuple(
    """meeting review market concert fair lecture drill inspection dinner race auction workshop
    ceremony election rehearsal picnic""".split()
)
ORGS: tuple[str, ...] = tuple(
    """Office Institute Company Society Council Trust Club School Bureau Agency Museum
    Union""".split()
)
THINGS: tuple[str, ...] = tuple(
    """lamp chair table boat rope wagon ladder clock mirror carpet stove kettle saddle barrel
    basket hammer engine pump camera radio tent bicycle""".split()
)
GOODS: tuple[str, ...] = tuple(
    """chairs boats lamps horses books barrels beds tables windows trees sheep carts desks
    computers bicycles wells bells boxes""".split()
)

FIRST_NAMES: tuple[str, ...] = tuple(
    """Anna Peter Maria Paul Laura David Sara Thomas Emma Daniel Julia Martin Eva Simon Nina
    Robert Clara Oscar Alice Henry Ruth George Helen James Mary John Linda Frank Susan Mark Jane
    Kevin Rosa Carlos Ahmed Fatima Wei Yuki Priya Ivan Olga Omar Leila Hans Ingrid Pierre Sophie
    Luca Elena Ana Jose Amir Mei Ravi Noor Tom Kate Adam Grace Samuel""".split()
)

COMMON: tuple[str, ...] = tuple(
    """time year people way day man thing woman life child world school state family student
    group country problem hand part place case week company system program question work
    government number night point home water room mother area money story fact month lot right
    study book eye job word business issue side kind head house service friend father power hour
    game line end member law car city community name president team minute idea body information
    back parent face others level office door health person art war history party result change
    morning reason research girl guy moment air teacher force education foot boy age policy music
    market sense nation plan college interest death experience effect use class control care field
    development role effort rate heart drug show leader light voice wife whole police mind price
    report decision son view relation town road arm difference value summer season society tax
    director position player record paper space ground form event matter center project activity
    star table need court oil situation cost industry figure street image phone data picture
    practice piece land product doctor wall patient worker news test movie north love support
    technology step baby computer type film tree source organization hair window culture chance
    brother energy period course summer plant opportunity term letter condition choice rule
    daughter south husband floor campaign material population call economy hospital church risk
    fire future bank weather machine forest island river bridge valley winter garden kitchen
    animal bird fish horse engine train ship station village farm stone glass metal paint cloth
    shoe coat bread milk salt sugar coffee tea dinner lunch message signal password version
    server file folder screen key button network model token cache memory
    attention""".split()
)
VERBS: tuple[str, ...] = tuple(
    """make take find give tell ask seem feel try leave call want show hear play run move like
    believe hold bring write provide sit stand lose pay meet include continue set learn change
    lead understand watch follow stop create speak read allow add spend grow open walk win offer
    remember love consider appear buy wait serve send expect build stay fall cut reach kill remain
    suggest raise pass sell require report decide pull return explain carry develop hope drive
    break receive agree support remove describe produce compute store""".split()
)
ADJECTIVES: tuple[str, ...] = tuple(
    """good new first last long great little own other old big high different small large next
    early young important few public bad same able late hard strong special free clear full quiet
    warm cold dry wet bright dark slow quick empty open simple ready common rare deep wide narrow
    heavy light broken modern ancient careful""".split()
)
GLUE: tuple[str, ...] = tuple(
    """the a of and to in that it with as for was on are by be this had not but at from they she
    or an which you one we all her would there their will when who him been has more if no out do
    so can what up about into than them only some could these two may then any most also after
    did many before must through over where much your well down should because each just those
    how too still between never while under might both without again against""".split()
)

# a noun whose question would read like that of another relation is no attribute
ATTRIBUTE_NOUNS: tuple[str, ...] = tuple(
    word
    for word in dict.fromkeys(COMMON)
    if word not in {*KIN, *MARK_KINDS, "head", "price", "number", "home", "school", "desk"}
)
