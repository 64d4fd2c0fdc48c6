"""Domains about culture, sport and travel: what their tables, columns and values are called. Data only."""

from __future__ import annotations

from env_server.data.synthetic import words as w
from env_server.data.synthetic.spec import amount, category, date, domain, flag, measure, name, ordinal, real, table
from env_server.dataset import Split

CINEMA = domain("cinema", Split.TRAIN)(
    table("director", "directors:director|producers:producer|!Director:director:directors", 8, 16)(
        name("name|director_name|!Name", w.PEOPLE),
        category("country|nation", w.COUNTRIES),
        amount("awards|prizes", 1, 30),
        ordinal("birth_year|!birthYear:birth year", 1940, 1995),
    ),
    table("movie", "movies:movie|films:film|!movie:movie:movies", 20, 36, links="director:were made by")(
        name("title|movie_title|!Title", w.TITLES),
        category("genre|!Genre", w.pool("comedy thriller romance horror western")),
        real("rating|!Rating", 1, 9, sums=False),
        amount("minutes|length|!len:length", 70, 200),
        date("release_date|!released:release date", 1995, 2024),
        amount("budget", 5, 180),
    ),
    table("theater", "theaters:theater|!Theater:theater:theaters", 8, 14)(
        name("name|theater_name", w.PLACES),
        category("city|!City", w.CITIES),
        amount("seats|capacity|!num_seats:number of seats", 60, 480, 10),
    ),
    table("screening", "screenings:screening|shows:show", 28, 40, links="movie:are of|theater:are at")(
        date("show_date|!date", keep=1.0),
        amount("tickets|visitors", 5, 300),
        real("price|ticket_price|!ticket price", 4, 20),
        category("language|format", w.pool("english spanish french german japanese")),
    ),
)

MUSIC = domain("music", Split.TRAIN)(
    table("artist", "artists:artist|singers:singer|!Artist:artist:artists", 10, 20)(
        name("name|artist_name|!stage name", w.PEOPLE),
        category("country|nation|!Country", w.COUNTRIES),
        measure("age", 18, 76),
        amount("fans|followers", 10, 980, 5),
    ),
    table("album", "albums:album|records:record|!album:album:albums", 14, 26, links="artist:are by")(
        name("title|album_title", w.TITLES),
        category("genre|style", w.pool("rock jazz pop folk blues soul")),
        ordinal("year|release_year", 1970, 2024),
        amount("sales|copies_sold|!copiesSold:copies sold", 10, 900, 10),
    ),
    table("song", "songs:song|tracks:track|!Song:song:songs", 26, 40, links="album:are on")(
        name("title|song_title|!Title", w.TITLES),
        amount("seconds|length|!len:length", 95, 420),
        measure("tempo", 60, 190),
        real("rating|score", 1, 9, sums=False),
        flag("explicit"),
    ),
    table("concert", "concerts:concert|gigs:gig", 20, 34, optional=True, links="artist:were given by")(
        date("concert_date|!date", keep=1.0),
        category("city|venue_city", w.CITIES),
        amount("tickets|audience", 40, 950, 10),
        real("price|ticket_price", 8, 90),
    ),
)

MUSEUM = domain("museum", Split.TRAIN)(
    table("museum", "museums:museum|galleries:gallery|!Museum:museum:museums", 8, 14)(
        name("name|museum_name", w.PLACES),
        category("city|location", w.CITIES),
        amount("rooms|halls|!num_rooms:number of rooms", 4, 60),
        ordinal("founding_year|!founded:founding year", 1800, 2010),
    ),
    table("painter", "painters:painter|artists:artist|!painter:painter:painters", 10, 18)(
        name("name|painter_name|!Name", w.PEOPLE),
        category("country|nation", w.COUNTRIES),
        ordinal("birth_year|!born:birth year", 1800, 1980),
        category("style|movement", w.pool("cubism realism baroque gothic modern")),
    ),
    table(
        "painting",
        "paintings:painting|works:work|!Painting:painting:paintings",
        26,
        40,
        links="painter:are by|museum:hang in",
    )(
        name("title|painting_title|!Title", w.TITLES),
        amount("value|price|!Value", 20, 980, 5),
        real("height|!ht:height", 20, 250, sums=False),
        real("width", 20, 300, sums=False),
        category("material|medium", w.pool("oil ink chalk marble bronze")),
        ordinal("year|!Year", 1830, 2015),
    ),
    table("tour", "tours:tour|excursions:excursion", 20, 36, optional=True, links="museum:take place in")(
        date("tour_date|!date", keep=1.0),
        amount("visitors|guests", 4, 60),
        category("language|!Language", w.pool("english spanish french german japanese")),
        real("fee|price", 3, 30),
    ),
)

LIBRARY = domain("library", Split.EVAL)(
    table("author", "authors:author|writers:writer|!Author:author:authors", 8, 16)(
        name("name|author_name|!Name", w.PEOPLE),
        category("country|nation|!Country", w.COUNTRIES),
        ordinal("birth_year|!birthYear:birth year", 1900, 1990),
        amount("awards|prizes", 1, 25),
    ),
    table("book", "books:book|novels:novel|!book:book:books", 22, 36, links="author:were written by")(
        name("title|book_title|!Title", w.TITLES),
        category("genre|category|!group", w.pool("fantasy mystery romance poetry science")),
        amount("pages|!num_pages:number of pages", 80, 790),
        ordinal("year|publishing_year", 1950, 2024),
        real("price", 5, 60),
    ),
    table("member", "members:member|readers:reader|!Member:member:members", 14, 28)(
        name("name|member_name", w.PEOPLE),
        category("city|town", w.CITIES),
        measure("age|!Age", 9, 84),
        date("join_date|!joined:join date|!joinDate:join date", 2012, 2023),
    ),
    table("loan", "loans:loan|borrowings:borrowing", 28, 40, links="book:are of|member:were made by")(
        date("loan_date|!date", keep=1.0),
        amount("days|duration", 3, 60),
        real("fine|penalty|!late fee", 1, 25),
        category("status|state", w.pool("returned overdue renewed lost")),
    ),
)

LEAGUE = domain("league", Split.TRAIN)(
    table("team", "teams:team|clubs:club|!Team:team:teams", 8, 16)(
        name("name|team_name|!Name", w.TEAMS),
        category("city|home_city", w.CITIES),
        ordinal("founding_year|!founded:founding year", 1880, 2005),
        amount("titles|trophies", 1, 40),
    ),
    table("player", "players:player|athletes:athlete|!player:player:players", 26, 40, links="team:play for")(
        name("name|player_name|!fullName:full name", w.PEOPLE),
        category("position|role|!Position", w.pool("goalkeeper defender midfielder striker")),
        measure("age", 17, 39),
        amount("goals|points", 1, 60),
        real("height", 150, 209, sums=False),
        category("country|nation", w.COUNTRIES, keep=0.4),
    ),
    table("coach", "coaches:coach|trainers:trainer|!Coach:coach:coaches", 8, 14, optional=True, links="team:work for")(
        name("name|coach_name", w.PEOPLE),
        measure("age", 32, 70),
        amount("salary|wage", 1500, 9000, 100),
        measure("experience|years", 1, 30),
    ),
    table("game", "games:game|matches:match|!match:match:matches", 26, 40, links="team:are hosted by")(
        date("game_date|match_date|!date", keep=1.0),
        amount("attendance|spectators", 100, 9800, 50),
        category("weather|!Weather", w.pool("sunny rainy cloudy windy snowy")),
        amount("goals|score", 0, 12),
    ),
)

GYM = domain("gym", Split.TRAIN)(
    table("trainer", "trainers:trainer|coaches:coach|!Trainer:trainer:trainers", 8, 14)(
        name("name|trainer_name", w.PEOPLE),
        amount("salary|wage|!Salary", 1400, 4500, 50),
        measure("experience|years", 1, 25),
        category("city|!City", w.CITIES),
    ),
    table("class", "classes:class|lessons:lesson|!Class:class:classes", 8, 12, links="trainer:are led by")(
        name("name|class_name|!Name", w.WORKOUTS),
        category("level|difficulty|!Level", w.LEVELS),
        amount("minutes|duration", 20, 120, 5),
        category("weekday|day", w.DAYS),
        amount("capacity|places|!max_places:place limit", 6, 40),
    ),
    table("member", "members:member|athletes:athlete|!member:member:members", 18, 36)(
        name("name|member_name", w.PEOPLE),
        measure("age|!Age", 16, 74),
        real("weight|body_weight|!wt:weight", 45, 120, sums=False),
        category("plan|tier|!Plan", w.TIERS),
        date("join_date|!joined:join date|!joinDate:join date", 2016, 2024),
    ),
    table("session", "sessions:session|workouts:workout", 28, 40, links="member:were attended by|class:belong to")(
        date("session_date|!date", keep=1.0),
        amount("calories|!kcal:calories", 80, 900, 10),
        measure("pulse|heart_rate", 80, 180),
        measure("rating|score", 1, 10),
    ),
)

HOTEL = domain("hotel", Split.EVAL)(
    table("hotel", "hotels:hotel|resorts:resort|!Hotel:hotel:hotels", 8, 14)(
        name("name|hotel_name|!Name", w.PLACES),
        category("city|location|!City", w.CITIES),
        measure("stars|!Stars", 1, 5),
        ordinal("opening_year|!opened:opening year", 1950, 2020),
    ),
    table("room", "rooms:room|suites:suite|!room:room:rooms", 20, 36, links="hotel:are in")(
        category("type|room_type|!roomType:room type", w.pool("single double twin family studio")),
        real("price|night_price|!night price", 30, 350),
        measure("floor", 1, 15),
        amount("beds|!num_beds:number of beds", 1, 6),
        category("view|!View", w.pool("sea garden street park")),
    ),
    table("guest", "guests:guest|travelers:traveler|!Guest:guest:guests", 16, 32)(
        name("name|guest_name|!fullName:full name", w.PEOPLE),
        category("country|nation|!Country", w.COUNTRIES),
        measure("age", 18, 85),
        amount("points|bonus", 10, 900, 10),
    ),
    table(
        "booking",
        "bookings:booking|stays:stay|!Booking:booking:bookings",
        28,
        40,
        links="guest:were made by|room:are for",
    )(
        date("arrival_date|!check_in:arrival date|!date", keep=1.0),
        amount("nights|!num_nights:number of nights", 1, 21),
        real("total|amount|!amt:amount", 40, 990),
        category("payment|payment_method", w.PAYMENTS),
        flag("breakfast"),
    ),
)

RESTAURANT = domain("restaurant", Split.TRAIN)(
    table("restaurant", "restaurants:restaurant|kitchens:kitchen|!Restaurant:restaurant:restaurants", 8, 16)(
        name("name|restaurant_name", w.PLACES),
        category("city|!City", w.CITIES),
        amount("tables|seats|!num_tables:number of tables", 6, 70),
        category("cuisine|style", w.pool("italian indian mexican thai greek")),
        ordinal("opening_year|!opened:opening year", 1970, 2022),
    ),
    table("chef", "chefs:chef|cooks:cook|!chef:chef:chefs", 10, 18, links="restaurant:work at")(
        name("name|chef_name|!Name", w.PEOPLE),
        measure("age", 21, 66),
        amount("salary|wage", 1600, 5200, 50),
        measure("experience|years|!exp:experience", 1, 35),
    ),
    table("dish", "dishes:dish|meals:meal|!Dish:dish:dishes", 16, 24, links="chef:are cooked by")(
        name("name|dish_name", w.DISHES),
        real("price|!menu price", 4, 48),
        category("course|!order", w.pool("starter main dessert snack")),
        amount("calories|!kcal:calories", 90, 980, 10),
        flag("vegan"),
    ),
    table("review", "reviews:review|ratings:rating", 26, 40, links="restaurant:are about")(
        date("review_date|!date", keep=1.0),
        measure("stars|points", 1, 10),
        amount("likes|votes", 1, 95),
        category("mood|tone", w.pool("happy neutral angry excited")),
    ),
)

LEISURE = (CINEMA, MUSIC, MUSEUM, LIBRARY, LEAGUE, GYM, HOTEL, RESTAURANT)
