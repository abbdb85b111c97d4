"""Everyday words. Data only; the world's own words are in `looseleaf_lab.evals.world.words`."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    """Words of a text; an underscore stands for a space within one."""
    return tuple(word.replace("_", " ") for word in text.split())


THINGS: tuple[str, ...] = listed(
    """alarm album antenna apple apron armchair axe badge bag ball balloon bandage banner barrel
    basin basket bath battery beam bean bed bell belt bench bike bin blanket blender boat boiler
    bolt book boot bottle bowl box bracelet brick broom brush bucket bulb button cable cake
    calendar camera candle canoe car card carpet carrot cart case chain chair chart cheese chest
    chimney chisel clock closet coat coin collar comb compass computer cooker cord cot couch
    crate cup cupboard curtain cushion desk diary dish door drawer dress drill dryer drum duvet
    easel egg envelope fan fence ferry file filter flag flask flower flute folder fork fountain
    frame freezer fridge fuse garage garden gate generator globe glove grill guitar hammer
    handle hanger harness hat heater hedge helmet hinge hook hose invoice iron jacket jar jug
    kayak kettle key keyboard kite knife label ladder lamp lantern laptop lawn leaflet lease
    lens letter lever lid lift light lighter lock locker machine magnet mailbox manual map mask
    mat mattress meter microphone microwave mirror mixer mop motor mower mug nail napkin
    necklace needle net notebook nozzle oar office oven paddle padlock pan panel parasol parcel
    passport paste pedal pen pencil piano pillow pipe pitcher plan plank plant plate plug poster
    pot printer projector pump purse puzzle quilt rack radio rake receipt recipe record remote
    report ribbon ring robe roof rope router rucksack ruler saddle safe sail sandal saucer saw
    scale scanner scarf scissors screen screw seat sewing shed sheet shelf shirt shoe shovel
    shower shutter sign sink skate ski sled sleeve slipper soap sock sofa spade spanner speaker
    spoon spray stairs stamp stapler statue stool stove strap suit suitcase sweater switch table
    tablet tank tap tape telescope tent thermostat ticket tie tile timer toaster toilet tool
    toolbox torch towel tractor trailer train tray tree tripod trolley trophy trumpet trunk tyre
    umbrella uniform valve van vase vest violin wagon wallet wardrobe washer watch whistle wheel
    window wire wrench zipper"""
)
PLURALS: tuple[str, ...] = listed(
    """accounts answers applications appointments badges bags bins blankets boats bookings books
    boxes brochures cables cakes candles cards chairs cheques chickens claims clocks complaints
    contracts cookies copies cups curtains customers decorations dishes documents doors drawings
    drinks eggs emails exams expenses files flowers folders forms fruits games gifts glasses
    guests helmets horses images invitations invoices jobs keys knives labels lamps leaflets
    lessons letters lights lists lockers machines maps masks meals medicines messages minutes
    mugs nails newspapers notes numbers offers orders packages pans papers parcels payments pens
    permits pets photos pictures pies pillows pipes plants plates posters potatoes presents
    printers prizes problems programmes questions receipts recipes records refunds rehearsals
    reminders rents repairs reports requests reservations results roads rooms rules salads
    samples sandwiches scores sheets shirts shoes signs slides snacks songs speeches stamps
    stickers stones supplies tables taxes tents tests tickets tiles tools towels toys trees
    trips tyres uniforms vouchers walls weeds windows workshops"""
)
MASS: tuple[str, ...] = listed(
    """baking_powder basil beef bread broth butter cement charcoal cheese chocolate cinnamon cocoa
    coffee cream detergent fabric firewood flour fuel garlic ginger glue gravel honey jam juice
    lemon_juice margarine mayonnaise milk mustard oil olive_oil paint parsley pasta pepper
    plaster rice salt sand soil spinach starch sugar syrup tea thyme tofu vanilla vinegar water
    wax wine wood wool yeast yogurt"""
)
COUNTED: tuple[str, ...] = listed(
    """apples bananas beds bottles bowls boys buses cabins candles cars cats chairs children
    computers cups cows days desks dogs doors eggs employees engines floors girls guests horses
    houses keys lamps lemons lockers members nurses onions pages parking_spaces people players
    plates potatoes pupils rooms rows sausages seats sheep shelves spoons stairs stations
    students tables teachers teams tents tickets tomatoes towels trees visitors volunteers weeks
    windows workers"""
)
PLACES: tuple[str, ...] = listed(
    """airport apartment attic bakery bank barn basement bathroom bay beach bedroom boathouse
    bookshop bridge cabin cafe camp campsite canteen castle cathedral cellar cemetery centre
    chapel church cinema clinic club college cottage courthouse courtyard crossing dairy depot
    dock embassy factory farm farmhouse ferry field flat forest fortress gallery garage garden
    greenhouse gym hall hangar harbour hospital hostel hotel house hut inn island kennel
    kindergarten kiosk kitchen laboratory lake laundry library lighthouse lodge lounge market
    mill monastery mosque museum nursery office orchard palace park pavilion pharmacy pier
    playground pool porch port post restaurant river salon school shop square stadium station
    studio supermarket temple terminal terrace theatre tower town university village villa
    warehouse waterfall windmill workshop yard zoo"""
)
SPOTS: tuple[str, ...] = listed(
    """attic bag barrel basement basket bathroom bench boot bowl box bucket cabinet car case cellar
    chest closet corridor cupboard desk door drawer envelope fence fireplace folder freezer
    fridge garage garden gate glovebox hall hallway hedge jar kitchen ladder letterbox locker
    mat mirror office oven pantry piano pot printer rack roof room safe shed shelf sink sofa
    stairs stove suitcase table tin toolbox tray tree trunk vase wall wardrobe window workbench"""
)
ROLES: tuple[str, ...] = listed(
    """accountant actor agent architect artist assistant author babysitter baker barber bookkeeper
    boss builder butcher buyer captain caretaker carpenter cashier chair chairman chairwoman
    chef cleaner clerk coach conductor contact cook coordinator counsellor dentist designer
    director doctor driver editor electrician engineer examiner florist founder gardener
    goalkeeper guard guide hairdresser handyman headmaster host housekeeper inspector instructor
    interpreter janitor judge landlady landlord lawyer leader lecturer librarian lifeguard
    manager mayor mechanic minister moderator musician nanny neighbour notary nurse optician
    organiser organist owner painter partner pharmacist photographer physiotherapist pilot
    plumber postman president priest producer professor programmer receptionist referee roofer
    sailor salesman scientist secretary singer speaker supervisor supplier surgeon tailor
    teacher technician tenant therapist trainer translator treasurer tutor vet waiter warden
    watchman winner writer"""
)
KIN: tuple[str, ...] = listed(
    """aunt boss boyfriend brother colleague cousin dad daughter father flatmate friend girlfriend
    grandfather grandma grandmother grandpa husband mother mum neighbour nephew niece partner
    sister son teacher uncle wife"""
)
RELATIONS: tuple[str, ...] = listed(
    """access account address age amount area balance bed birth_name brand budget capacity capital
    category chapter charge class code colour combination contact cost country currency
    date_of_birth deadline default deposit depth destination diameter difficulty dose door_code
    e-mail email fee flavour floor folder format frequency gate grade guest_password head_office
    height hobby home_page host hourly_rate id instrument IP_address language length level
    licence_plate limit link location login main_course material maximum meeting_point
    member_number menu mileage minimum mobile_number model mood motto name nationality network
    network_name nickname number opening_date order_number origin owner parking_space passcode
    password pattern phone pin PIN platform plot policy_number port postcode pressure price
    project publisher purpose quantity rank rate reference region release rent result room
    room_number route salary score season seat serial_number server shape share shelf size
    slogan source speed starting_point state status street style subject surname symbol target
    tax_number team telephone temperature theme title token topic total type user user_name
    username value version voltage volume warranty website weight width wifi wifi_code wifi_name
    wifi_password window_seat WLAN_key year zip_code"""
)
LIKED: tuple[str, ...] = listed(
    """animal band bird book cake colour day dish drink film flower food fruit game holiday
    ice_cream meal month music number place restaurant season singer snack song sport soup
    subject sweet tea team toy tree"""
)
EVENTS: tuple[str, ...] = listed(
    """appointment assembly auction ball barbecue birthday breakfast brunch call ceremony check-up
    class concert conference course dance deadline delivery demonstration dinner exam excursion
    exhibition fair festival final fitting game graduation hearing holiday inspection interview
    journey kick-off launch lecture lesson lunch maintenance market marathon match meeting move
    opening outing parade party performance picnic play practice premiere presentation quiz race
    reading rehearsal reunion review sale seminar service session show sprint summit supper talk
    test tour tournament training trial trip vaccination visit vote walk wedding webinar
    workshop"""
)
OPENING: tuple[tuple[str, str], ...] = (
    ("open", "opens"), ("close", "closes"), ("start", "starts"), ("begin", "begins"),
    ("end", "ends"), ("leave", "leaves"), ("arrive", "arrives"), ("finish", "finishes"),
    ("depart", "departs"), ("stop", "stops"), ("ring", "rings"), ("run", "runs"), ("come", "comes"),
    ("return", "returns"),
)  # fmt: skip
VEHICLES: tuple[str, ...] = listed("bus tram train ferry line coach boat shuttle flight")
# base form, third person, past, participle
IRREGULAR: tuple[tuple[str, str, str, str], ...] = (
    ("bring", "brings", "brought", "brought"), ("buy", "buys", "bought", "bought"),
    ("build", "builds", "built", "built"), ("choose", "chooses", "chose", "chosen"),
    ("draw", "draws", "drew", "drawn"), ("feed", "feeds", "fed", "fed"),
    ("find", "finds", "found", "found"),
    ("found", "founds", "founded", "founded"), ("get", "gets", "got", "got"),
    ("give", "gives", "gave", "given"), ("hold", "holds", "held", "held"),
    ("keep", "keeps", "kept", "kept"), ("lead", "leads", "led", "led"),
    ("lend", "lends", "lent", "lent"), ("lose", "loses", "lost", "lost"),
    ("make", "makes", "made", "made"), ("pay", "pays", "paid", "paid"),
    ("read", "reads", "read", "read"), ("run", "runs", "ran", "run"),
    ("sell", "sells", "sold", "sold"), ("send", "sends", "sent", "sent"),
    ("set", "sets", "set", "set"), ("sing", "sings", "sang", "sung"),
    ("take", "takes", "took", "taken"), ("teach", "teaches", "taught", "taught"),
    ("wear", "wears", "wore", "worn"), ("write", "writes", "wrote", "written"),
)  # fmt: skip
REGULAR: tuple[str, ...] = listed(
    """announce answer approve arrange assemble bake book borrow brush call cancel carry change
    charge check choose clean clear close collect cook copy correct count cover deliver design
    discuss distribute download edit empty examine explain file fill finish fix fold grade guard
    handle hang help hire host improve inspect install invite iron keep label launch like load
    lock love maintain manage measure mend monitor move name need notify offer open order
    organise own pack paint park peel pick plan plant play polish post prefer prepare present
    print program promise prune publish record recycle register remove renew rent repair replace
    report reserve review sew share ship sign sort stamp start stock store study supply switch
    test tidy train translate tune update use verify wash watch water weigh wipe wrap"""
)
TOWNS: tuple[str, ...] = listed(
    """Aberdeen Accra Antwerp Athens Austin Basel Bergen Bilbao Bologna Boston Bristol Cairo
    Cardiff Chicago Cork Delhi Denver Dresden Dublin Florence Geneva Ghent Glasgow Granada
    Hamburg Hanoi Helsinki Innsbruck Istanbul Jena Kiel Krakow Kyoto Lagos Leeds Leipzig Lima
    Linz London Lyon Madrid Malaga Melbourne Milan Montreal Munich Nairobi Naples Nice Odense
    Oslo Oxford Paris Porto Prague Quito Riga Rome Salzburg Seoul Seville Sheffield Sofia
    Stockholm Sydney Tallinn Tokyo Toronto Trieste Turin Uppsala Valencia Venice Verona Vienna
    Vilnius Warsaw York Zagreb Zurich"""
)
FIRST_NAMES: tuple[str, ...] = listed(
    """Aaron Abigail Adrian Aisha Agnes Albert Alex Alfred Amelia Andrea Andrew Angela Anton Arthur
    Astrid Barbara Beatrice Ben Bernard Bianca Bob Bridget Bruno Camila Caroline Cecilia Charles
    Charlotte Chloe Christian Claire Connor Cynthia Dennis Diana Diego Dominic Dora Dylan Edgar
    Edith Edward Eleanor Elias Elise Ellen Emil Erik Esther Ethan Felix Fiona Flora Francis
    Freya Gabriel Gemma Gloria Gustav Hannah Harriet Harry Hassan Heidi Hugo Ibrahim Ida Igor
    Imran Irene Isabel Ismail Jack Jacob Jasmine Jason Jessica Joan Johan Jonas Joseph Joyce
    Judith Jules Karen Karim Katrin Kenji Klaus Lars Laurence Leo Leon Lewis Liam Lily Lisa
    Lorenzo Louis Lucy Ludwig Magnus Manuel Margaret Marcus Marta Matteo Maxim Megan Michael
    Miriam Mohamed Monica Nathan Natalia Niklas Oliver Olivia Otto Patrick Pedro Philip Rachel
    Rafael Rebecca Renate Richard Rita Roland Roman Sandra Santiago Sebastian Sharon Sigrid
    Stefan Stella Steven Sven Tamara Teresa Theo Tim Ursula Valerie Vera Victor Vincent Violet
    Walter Wendy Werner William Yasmin Yusuf Zoe"""
)
SURNAMES: tuple[str, ...] = listed(
    """Adams Ahmad Andersen Baker Bauer Becker Bennett Berg Bianchi Brown Campbell Carter Chen
    Clark Costa Cruz Davies Dubois Eriksen Evans Fernandez Fischer Foster Garcia Gomez Gupta
    Haas Hansen Harris Hoffmann Hughes Ibrahim Ito Jackson Jansen Jensen Johnson Jones Kaya
    Keller Khan Kim King Klein Kowalski Larsen Lee Lehmann Lewis Lopez Meyer Miller Moore
    Morales Morgan Mueller Murphy Nguyen Nielsen Novak Olsen Park Patel Petrov Phillips Popov
    Ramos Reed Richter Roberts Rossi Santos Schmidt Schneider Scott Sharma Silva Singh Smith
    Sokolov Suzuki Tanaka Taylor Thompson Turner Vogel Walker Wang Ward Weber White Williams
    Wilson Wood Wright Yamamoto Young Zhang Zimmermann"""
)
TITLES: tuple[str, ...] = listed("Mr. Mrs. Ms. Dr. Prof. Aunt Uncle")
COLOURS: tuple[str, ...] = listed(
    """beige black blue brown cream crimson dark gold golden green grey lilac orange pale pink
    purple red silver turquoise white yellow"""
)
ADJECTIVES: tuple[str, ...] = listed(
    """back big broken cheap clean common cordless digital dirty double electric emergency empty
    extra family first front full general guest heavy inner large last left lower main metal
    middle monthly narrow new next old opposite outer plastic portable private public rear right
    round second secret shared short single small spare special square steel tall third upper
    weekly wide wooden yearly"""
)
ANIMALS: tuple[str, ...] = listed(
    """bear bird budgie canary cat chicken cow dog donkey duck ferret fish fox frog goat goldfish
    goose guinea_pig hamster hedgehog hen horse kitten lamb lizard mouse owl parrot pig pony puppy
    rabbit rat sheep snail snake spider tortoise turtle"""
)
RESTING: tuple[str, ...] = listed(
    "rest cook bake dry soak cool simmer boil chill wait steam roast stay last work park charge"
)
UNITS: tuple[str, ...] = listed(
    """g kg ml l litres cm m km mm euros dollars pounds francs crowns cents percent degrees hours
    minutes seconds days weeks months years grams spoons cups tablespoons teaspoons slices
    pieces sheets boxes bottles bags miles watts volts"""
)
MONEY: tuple[str, ...] = listed("euros euro dollars pounds francs crowns cents")
SPANS: tuple[str, ...] = listed("hours minutes seconds days weeks months years nights")
NUMERALS: tuple[str, ...] = listed(
    "one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty"
)
HOURS: tuple[str, ...] = (
    "noon", "midnight", "half past six", "quarter to nine", "seven in the morning",
    "eight in the evening", "ten o'clock", "six o'clock", "half past two", "three in the afternoon",
)  # fmt: skip
ENDINGS: tuple[str, ...] = ("example", "com", "org", "net", "de", "io", "uk", "fr", "local", "lan")
