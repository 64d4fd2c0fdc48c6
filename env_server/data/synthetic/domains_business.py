"""Domains about work and trade: what their tables, columns and values are called. Data only."""

from __future__ import annotations

from env_server.data.synthetic import words as w
from env_server.data.synthetic.spec import amount, category, date, domain, flag, measure, name, ordinal, real, table
from env_server.dataset import Split

CLINIC = domain("clinic", Split.TRAIN)(
    table("owner", "owners:owner|clients:client|!Owner:owner:owners", 10, 22)(
        name("name|owner_name|!Name", w.PEOPLE),
        category("city|town|!City", w.CITIES),
        measure("age", 18, 85),
        amount("balance|debt", 5, 400),
    ),
    table("vet", "vets:vet|doctors:doctor|!vet:vet:vets", 8, 12, optional=True)(
        name("name|vet_name", w.PEOPLE),
        category("specialty|field", w.pool("surgery dental nutrition behavior vaccines")),
        measure("experience|years", 1, 35),
        amount("fee|!Fee", 20, 200, 5),
    ),
    table("pet", "pets:pet|animals:animal|!pet:pet:pets", 20, 30, links="owner:belong to")(
        name("name|pet_name|!Name", w.PETS),
        category("species|kind|!petType:pet type", w.pool("dog cat rabbit parrot hamster turtle")),
        real("weight|!wt:weight", 1, 45, sums=False),
        measure("age|pet_age", 1, 17),
        date("birth_date|!born:birth date|!dob:birth date"),
        flag("vaccinated"),
    ),
    table("visit", "visits:visit|checkups:checkup", 28, 40, links="pet:are for|vet:are handled by")(
        date("visit_date|!day:visit date|!date", keep=1.0),
        category("reason|purpose", w.pool("vaccine injury fever allergy control")),
        real("cost|bill|!total cost", 20, 300),
        amount("minutes|duration", 10, 90, 5),
    ),
)

SCHOOL = domain("school", Split.TRAIN)(
    table("teacher", "teachers:teacher|tutors:tutor|!Teacher:teacher:teachers", 8, 14)(
        name("name|teacher_name", w.PEOPLE),
        category("department|!dept:department", w.pool("science language arts sports")),
        measure("age", 25, 66),
        amount("salary|!Salary", 2000, 5800, 100),
    ),
    table("course", "courses:course|subjects:subject|!Course:course:courses", 10, 18, links="teacher:are taught by")(
        name("title|course_name|!Title", w.SUBJECTS),
        amount("credits", 2, 12),
        amount("hours|!num_hours:number of hours", 10, 80, 2),
        category("level|!group", w.LEVELS),
    ),
    table("student", "students:student|pupils:pupil|!student:student:students", 24, 40)(
        name("name|student_name|!Name", w.PEOPLE),
        category("city|home_city|!home town", w.CITIES),
        measure("age|!Age", 14, 29),
        ordinal("year|entry_year", 2015, 2024),
        real("height", 140, 199, sums=False),
        date("birth_date|!birthDate:birth date", 1998, 2009),
    ),
    table("enrollment", "enrollments:enrollment|grades:grade", 30, 40, links="student:are of|course:are in")(
        measure("score|mark|points", 20, 100),
        category("semester|term", w.SEASONS),
        date("exam_date|!date"),
        amount("absences", 0, 25),
    ),
)

SHOP = domain("shop", Split.TRAIN)(
    table("customer", "customers:customer|buyers:buyer|!Customer:customer:customers", 12, 26)(
        name("name|customer_name|!fullName:full name", w.PEOPLE),
        category("city|!City", w.CITIES),
        category("country|nation", w.COUNTRIES, keep=0.4),
        amount("points|bonus", 5, 500, 5),
        date("join_date|signup_date"),
    ),
    table("supplier", "suppliers:supplier|vendors:vendor", 8, 12, optional=True)(
        name("name|supplier_name", w.PLACES),
        category("country|nation", w.COUNTRIES),
        real("rating|!Rating", 1, 9, sums=False),
        ordinal("founding_year|!founded:founding year", 1950, 2015),
    ),
    table("product", "products:product|items:item|!product:product:products", 18, 30, links="supplier:come from")(
        name("name|product_name|!Product", w.PRODUCTS),
        category("category|department|!group", w.pool("home office sport fashion music")),
        real("price|!unit price", 5, 250),
        amount("stock|!qty:quantity", 1, 95),
        category("color|!Color", w.COLORS),
    ),
    table(
        "order",
        "orders:order|purchases:purchase|!order:order:orders",
        28,
        40,
        links="customer:were placed by|product:are for",
    )(
        date("order_date|!date", keep=1.0),
        amount("quantity|units|!qty:quantity", 1, 24),
        category("status|!Status", w.STATUSES),
        category("payment|payment_method", w.PAYMENTS),
    ),
)

AIRLINE = domain("airline", Split.TRAIN)(
    table("airport", "airports:airport|!Airport:airport:airports", 10, 16)(
        name("city|airport_name", w.CITIES),
        category("region|zone", w.pool("north south east west center")),
        amount("gates|!num_gates:number of gates", 4, 60),
        ordinal("opening_year|!opened:opening year", 1930, 2012),
    ),
    table("plane", "planes:plane|!aircraft:plane:planes", 8, 14)(
        name("model|plane_name", w.PLANES),
        amount("seats|capacity", 40, 380, 2),
        measure("range|flight_range", 900, 9000, 100),
        category("maker|manufacturer", w.pool("boeing airbus embraer bombardier")),
    ),
    table("pilot", "pilots:pilot|captains:captain", 10, 20, optional=True)(
        name("name|pilot_name", w.PEOPLE),
        measure("age", 26, 64),
        amount("flight_hours|hours", 300, 9500, 50),
        category("rank|!Rank", w.pool("junior senior chief instructor")),
        date("hire_date|!hired:hire date|!hireDate:hire date", 2005, 2023),
    ),
    table("flight", "flights:flight|trips:trip", 28, 40, links="airport:leave from|plane:use|pilot:are flown by")(
        date("departure_date|!date", keep=1.0),
        amount("passengers|travelers", 15, 350),
        amount("delay|delay_minutes", 0, 180, 5),
        amount("distance|miles", 150, 8800, 10),
        category("status|state", w.pool("landed delayed boarding cancelled")),
    ),
)

COMPANY = domain("company", Split.TRAIN)(
    table("department", "departments:department|divisions:division|!dept:department:departments", 8, 12)(
        name("name|department_name|!Name", w.DEPARTMENTS),
        category("city|location", w.CITIES),
        amount("budget|!annual budget", 100, 900, 10),
        measure("floor", 1, 20),
    ),
    table(
        "employee", "employees:employee|workers:worker|!Employee:employee:employees", 24, 40, links="department:work in"
    )(
        name("name|employee_name|!fullName:full name", w.PEOPLE),
        category("job|position|!jobTitle:job title", w.pool("manager engineer analyst clerk assistant")),
        amount("salary|wage|!Salary", 1800, 6400, 100),
        measure("age", 20, 65),
        date("hire_date|start_date|!hireDate:hire date", 2008, 2024),
        flag("remote"),
    ),
    table("project", "projects:project|!Project:project:projects", 10, 15, links="department:are run by")(
        name("name|project_name|code_name", w.PROJECTS),
        amount("budget|cost", 20, 600, 5),
        category("priority|!Priority", w.PRIORITIES),
        date("deadline|end_date|!due date", 2020, 2026),
    ),
    table("assignment", "assignments:assignment|tasks:task", 28, 40, links="employee:are done by|project:are part of")(
        amount("hours|!hrs:hours", 4, 160, 2),
        category("role|!Role", w.pool("leader member reviewer tester")),
        date("start_date|assigned_date"),
        measure("progress", 5, 100, 5),
    ),
)

BANK = domain("bank", Split.TRAIN)(
    table("branch", "branches:branch|offices:office|!Branch:branch:branches", 8, 14)(
        name("name|branch_name", w.PLACES),
        category("city|!City", w.CITIES),
        amount("assets", 50, 950, 5),
        amount("staff|desks", 3, 40),
        ordinal("opening_year|!opened:opening year", 1960, 2018),
    ),
    table("client", "clients:client|customers:customer|!client:client:clients", 16, 32)(
        name("name|client_name", w.PEOPLE),
        category("job|profession", w.pool("nurse lawyer teacher baker farmer engineer")),
        amount("income|!monthly income", 1200, 7000, 100),
        measure("age", 19, 88),
    ),
    table("account", "accounts:account|!Account:account:accounts", 24, 38, links="client:belong to|branch:are held at")(
        category("type|account_type|!Type", w.pool("savings checking business student")),
        real("balance|!bal:balance", 10, 990),
        date("opening_date|!opened:opening date|!openDate:opening date", 2010, 2024),
        real("interest|rate", 0, 6, sums=False),
    ),
    table("loan", "loans:loan|credits:credit", 14, 28, optional=True, links="client:were given to")(
        amount("amount|value|!amt:amount", 500, 9500, 50),
        category("purpose|reason", w.pool("house car study travel business")),
        measure("months|term", 6, 120, 6),
        date("due_date|!due date", 2024, 2032),
    ),
)

FARM = domain("farm", Split.EVAL)(
    table("farmer", "farmers:farmer|growers:grower|!Farmer:farmer:farmers", 10, 20)(
        name("name|farmer_name|!Name", w.PEOPLE),
        category("village|town", w.CITIES),
        measure("age", 22, 80),
        amount("income|!yearly income", 800, 6500, 50),
    ),
    table("field", "fields:field|parcels:parcel|!field:field:fields", 14, 22, links="farmer:belong to")(
        name("name|field_name", w.PLACES),
        category("soil|soil_type|!soilType:soil type", w.pool("clay sand silt peat loam")),
        real("area|size|!Area", 1, 60),
        measure("slope", 1, 25),
        flag("irrigated"),
    ),
    table("crop", "crops:crop|plants:plant|!Crop:crop:crops", 10, 16)(
        name("name|crop_name", w.CROPS),
        category("season|planting_season", w.SEASONS),
        real("price|!unit price", 1, 30),
        measure("growth_days|days", 40, 240, 5),
    ),
    table("harvest", "harvests:harvest|yields:yield", 28, 40, links="field:come from|crop:are of")(
        date("harvest_date|!date", keep=1.0),
        amount("tons|quantity|!qty:quantity", 2, 95),
        category("quality|grade", w.pool("poor fair good excellent")),
        amount("workers", 2, 30),
    ),
)

GARAGE = domain("garage", Split.EVAL)(
    table("driver", "drivers:driver|customers:customer|!Driver:driver:drivers", 12, 24)(
        name("name|driver_name|!fullName:full name", w.PEOPLE),
        category("city|home_city", w.CITIES),
        measure("age|!Age", 18, 82),
        amount("fines|penalties", 1, 30),
    ),
    table("car", "cars:car|vehicles:vehicle|!car:car:cars", 16, 22, links="driver:belong to")(
        name("model|car_name", w.CAR_MODELS),
        category("color|paint|!Color", w.COLORS),
        ordinal("year|build_year", 1998, 2024),
        amount("mileage|miles", 10, 240),
        category("fuel|fuel_type|!fuelType:fuel type", w.pool("petrol diesel electric hybrid")),
    ),
    table("mechanic", "mechanics:mechanic|technicians:technician", 8, 12)(
        name("name|mechanic_name", w.PEOPLE),
        amount("wage|salary", 1500, 4800, 50),
        category("shift|!Shift", w.pool("morning evening night")),
        measure("experience|years", 1, 30),
    ),
    table("repair", "repairs:repair|jobs:job", 28, 40, links="car:are for|mechanic:are done by")(
        date("repair_date|!date", keep=1.0),
        category("part|component", w.REPAIRS),
        real("cost|!total cost", 15, 700),
        amount("hours|!hrs:hours", 1, 24),
        flag("paid"),
    ),
)

BUSINESS = (CLINIC, SCHOOL, SHOP, AIRLINE, COMPANY, BANK, FARM, GARAGE)
