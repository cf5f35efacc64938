//! Handles to devices, and the list of those that this process has opened.

use crate::lane::{self, PlaceScope};
use crate::news::News;
use kiln_cpu::CPUS;
use kiln_device::{DeviceInfo, Error, Locality, Memory, Pending, Place, Profile, Record};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};

/// Names a device for the life of the process: the same address always has the same id.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// A place where tensors live and are computed. Cheap to clone; equal handles mean the same device.
///
/// A device on a server ends when it is closed, or when no server was to be had for a minute: what is asked of it then
/// fails with the reason. Opened again, the address gives a device with the same id that works, and that is not equal to
/// the one that has ended: tensors and handles of before stay with that, and fail.
#[derive(Clone)]
pub struct Device(Arc<Entry>);

struct Entry {
    id: DeviceId,
    address: String,
    driver: Arc<dyn kiln_device::Driver>,
    eager: AtomicBool,
    /// What the driver said when it was opened, for what stays as it is.
    info: DeviceInfo,
    /// Frees that found no lane to travel in; the next submission takes them along.
    orphans: Mutex<Vec<kiln_ir::Id>>,
    /// Failures that nobody was told of yet.
    news: Mutex<News>,
}

/// What this process has opened.
struct Devices {
    /// Each at the place of its id.
    all: Vec<Device>,
    opening: Vec<Arc<Opening>>,
}

/// A device that a thread is opening, which may take seconds; others that want it wait for the outcome.
struct Opening {
    address: String,
    outcome: Mutex<Option<Result<Device, Error>>>,
    done: Condvar,
}

/// Held for a look only: nothing is opened, asked or waited for under it.
static DEVICES: Mutex<Devices> = Mutex::new(Devices { all: Vec::new(), opening: Vec::new() });

fn devices() -> MutexGuard<'static, Devices> {
    DEVICES.lock().unwrap_or_else(|e| e.into_inner())
}

impl Devices {
    fn find(&self, address: &str) -> Option<&Device> {
        self.all.iter().find(|device| device.0.address == address)
    }

    /// Makes a device known, in the place of one that has ended if there is one.
    fn add(&mut self, address: String, driver: Arc<dyn kiln_device::Driver>) -> Device {
        let eager = AtomicBool::new(kiln_env::EAGER.is_on());
        let before = self.find(&address).map(|device| device.id());
        let id = before.unwrap_or(DeviceId(self.all.len() as u32));
        let (info, orphans, news) = (driver.info(), Mutex::default(), Mutex::default());
        let entry = Entry { id, address, driver, eager, info, orphans, news };
        let device = Device(Arc::new(entry));
        match self.all.get_mut(id.0 as usize) {
            Some(ended) => *ended = device.clone(),
            None => self.all.push(device.clone()),
        }
        device
    }
}

/// The thread that opens a device: tells those that wait for it, whatever happens.
struct Opener(Arc<Opening>);

impl Opener {
    fn tell(&self, outcome: Result<Device, Error>) {
        self.0.outcome.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(outcome);
        self.0.done.notify_all();
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        devices().opening.retain(|opening| !Arc::ptr_eq(opening, &self.0));
        // If it was told already, this changes nothing.
        self.tell(Err(Error::Stopped));
    }
}

impl Device {
    /// The first CPU device.
    pub fn cpu() -> Device {
        static CPU: LazyLock<Device> =
            LazyLock::new(|| Device::open("cpu").expect("the CPU is always there"));
        CPU.clone()
    }

    /// The plain interpreter: slow, obvious, and what every other device is compared with.
    pub fn reference() -> Device {
        Device::open("reference").expect("the reference is always there")
    }

    /// Opens the device at `address`: `cpu`, `cpu:1`, `reference`, or one on a server: `kiln://host:port/device`,
    /// `kilns://`, `ws://`, `wss://`, `unix:/path`, and `remote` for [`Device::remote`]. Further servers after commas
    /// stand in for the first. The same address gives the same device, until that has ended. Other devices can be opened
    /// while one is still connecting.
    pub fn open(address: &str) -> Result<Device, Error> {
        let named = kiln_env::REMOTE_ADDRESS.read()?;
        let text = match address.trim() {
            "remote" => named.as_deref().unwrap_or("kiln://127.0.0.1:7717"),
            address => address,
        };
        let address = canonical(text)?;
        let opening = loop {
            let known = devices().find(&address).cloned();
            if let Some(device) = known.as_ref().filter(|device| !device.has_ended()) {
                return Ok(device.clone());
            }
            let mut devices = devices();
            if devices.find(&address) != known.as_ref() {
                continue;
            }
            if let Some(opening) = devices.opening.iter().find(|opening| opening.address == address) {
                break Err(opening.clone());
            }
            let (outcome, done) = (Mutex::new(None), Condvar::new());
            let opening = Arc::new(Opening { address: address.clone(), outcome, done });
            devices.opening.push(opening.clone());
            break Ok(Opener(opening));
        };
        match opening {
            Ok(opener) => {
                let opened = start(&address, text).map(|driver| devices().add(address, driver));
                opener.tell(opened.clone());
                opened
            }
            Err(opening) => {
                let outcome = opening.outcome.lock().unwrap_or_else(|e| e.into_inner());
                let outcome = opening.done.wait_while(outcome, |outcome| outcome.is_none());
                outcome.unwrap_or_else(|e| e.into_inner()).clone().unwrap_or(Err(Error::Stopped))
            }
        }
    }

    /// The server that `KILN_REMOTE_ADDRESS` names, else the one on this machine.
    #[cfg(feature = "remote")]
    pub fn remote() -> Result<Device, Error> {
        Device::open("remote")
    }

    /// Makes a device of the user's own known under `address`, which must be new.
    pub fn wrap(address: &str, driver: Arc<dyn kiln_device::Driver>) -> Result<Device, Error> {
        let mut devices = devices();
        if devices.find(address).is_some() || canonical(address).is_ok() {
            return Err(Error::Address { address: address.into(), reason: "it is taken".into() });
        }
        Ok(devices.add(address.into(), driver))
    }

    /// The same device with every submission written to a file that `kiln replay` runs again.
    pub fn recorded(&self, path: impl AsRef<std::path::Path>) -> Result<Device, Error> {
        let driver = Record::new(self.0.driver.clone(), path)?;
        Ok(Device::decorate("record", Arc::new(driver), &self.0.address))
    }

    /// The same device with every operation timed. A device on a server is not slowed down: the server notes what it
    /// runs, fused groups too, on its own clock, and gives that to the report and the trace. The trace, for Chrome's
    /// viewer or Perfetto, goes to `path` as it grows: it is whole however the program ends, up to the last read or sync.
    pub fn profiled(&self, path: Option<std::path::PathBuf>) -> Result<(Device, Arc<Profile>), Error> {
        let driver = self.0.driver.clone();
        let profile = Arc::new(match self.is_asynchronous() {
            true => Profile::there(driver, path)?,
            false => Profile::new(driver, path)?,
        });
        Ok((Device::decorate("profile", profile.clone(), &self.0.address), profile))
    }

    fn decorate(kind: &str, driver: Arc<dyn kiln_device::Driver>, address: &str) -> Device {
        let mut devices = devices();
        let address = format!("{kind}<{address}>#{}", devices.all.len());
        devices.add(address, driver)
    }

    /// The device with this id.
    pub fn by_id(id: DeviceId) -> Result<Device, Error> {
        devices().all.get(id.0 as usize).cloned().ok_or(Error::UnknownDevice(id.0))
    }

    /// The local devices that can be opened, and every device that has been.
    pub fn list() -> Vec<Device> {
        let _ = (Device::open("cpu"), Device::open("reference"));
        devices().all.clone()
    }

    /// Its id: the same for the same address, for the life of the process.
    pub fn id(&self) -> DeviceId {
        self.0.id
    }

    /// Its address in the form that [`Device::open`] takes.
    pub fn address(&self) -> &str {
        &self.0.address
    }

    /// What it is and can do.
    pub fn info(&self) -> DeviceInfo {
        self.0.driver.info()
    }

    /// Bytes and values held, as of what has been executed; [`Device::sync`] first for a settled figure.
    pub fn memory(&self) -> Memory {
        self.0.driver.memory()
    }

    /// Sets the most bytes the device may hold. What exceeds it fails with [`Error::OutOfMemory`].
    pub fn set_memory_limit(&self, bytes: Option<usize>) {
        self.0.driver.limit(bytes);
    }

    /// Gives cached memory back to the system.
    pub fn cleanup(&self) {
        self.0.driver.cleanup();
    }

    /// Waits until everything that this thread recorded has been executed. Tells of what failed and no read has told of
    /// yet, each failure once: what this thread recorded, and what threads that have ended left behind. Several at once are
    /// [`Error::Several`].
    pub fn sync(&self) -> Result<(), Error> {
        self.sync_async().wait()
    }

    /// Like [`Device::sync`], awaited or waited for later. Its place in the stream is taken now.
    pub fn sync_async(&self) -> Pending<()> {
        lane::seal(self);
        let (device, lane) = (self.clone(), lane::own_lane(self));
        self.0.driver.sync().answered(move |done| done.and_then(|()| device.untold(lane)))
    }

    /// Submits what this thread recorded, without waiting for it.
    pub fn submit(&self) {
        lane::seal_background(self);
    }

    /// Ends a step: what follows is submitted apart from what came before, so that recurring steps look alike. The
    /// optimisers call it.
    pub fn mark(&self) {
        lane::mark(self);
    }

    /// Submits one operation at a time instead of in batches.
    pub fn set_eager(&self, eager: bool) {
        lane::seal(self);
        self.0.eager.store(eager, Ordering::Relaxed);
    }

    /// Runs `f` with the values it defines on this device kept out of the reuse arena: for weights and other
    /// long-lived values.
    pub fn persistent<T>(&self, f: impl FnOnce() -> T) -> T {
        let _scope = self.persistent_scope();
        f()
    }

    /// Like [`Device::persistent`], until the guard is dropped: `#[track_caller]` goes through no closure.
    pub fn persistent_scope(&self) -> PlaceScope {
        lane::place(self, Place::Persistent)
    }

    /// Makes host data ready for upload, so that [`crate::Tensor::from_data`] does not block on a copy later.
    pub fn stage(&self, data: Vec<kiln_device::Data>) -> Vec<kiln_device::Data> {
        self.0.driver.stage(data)
    }

    /// Brings what decorators hold to their files, then tells what [`Device::sync`] does.
    pub fn flush(&self) -> Result<(), Error> {
        let synced = self.sync();
        self.0.driver.flush()?;
        synced
    }

    /// What happened since this was last asked that nobody waited for, in words: lost servers that were replaced,
    /// moves that had to take the long way, steps that were skipped ([`crate::NonFinite::Skip`]). What servers have to do
    /// with it goes to the program's logger too, as warnings of `kiln::remote` (crate `log`); without a logger, a line on
    /// standard error says when a server is lost, and when it is back.
    pub fn events(&self) -> Vec<String> {
        let mut events = self.0.driver.events();
        events.extend(self.skipped());
        events
    }

    /// Ends the session with a server, which frees everything there at once instead of at the end of its lease. What
    /// is asked of the device afterwards fails with [`Error::Closed`], until it is opened again. Local devices stay as
    /// they are. The end of the process ends sessions too.
    pub fn close(&self) {
        self.0.driver.close();
    }

    /// Closes all devices that this process has opened.
    pub fn close_all() {
        let devices = devices().all.clone();
        devices.iter().for_each(Device::close);
    }

    /// The device below the handle.
    pub fn driver(&self) -> &Arc<dyn kiln_device::Driver> {
        &self.0.driver
    }

    /// Where it computes.
    pub fn locality(&self) -> &Locality {
        &self.0.info.locality
    }

    /// Whether it computes on a server.
    pub fn is_remote(&self) -> bool {
        self.0.info.is_remote()
    }

    /// Whether it computes on the cores that this program runs on.
    pub fn uses_host_cores(&self) -> bool {
        self.0.info.uses_host_cores()
    }

    /// Whether it computes values in memory that is chosen for them, see [`Tensor::computed_in`](crate::Tensor::computed_in).
    pub(crate) fn places_outputs(&self) -> bool {
        self.0.info.places_outputs
    }

    /// Whether it may fetch values from the other one.
    pub(crate) fn is_peer_of(&self, other: &Device) -> bool {
        self.0.info.peers.is_some() && self.0.info.peers == other.0.info.peers
    }

    pub(crate) fn unread(&self) -> &Mutex<News> {
        &self.0.news
    }

    /// Whether it has been closed or is lost for good.
    fn has_ended(&self) -> bool {
        self.0.driver.ended().is_some()
    }

    pub(crate) fn is_eager(&self) -> bool {
        self.0.eager.load(Ordering::Relaxed)
    }

    /// Whether it executes every operation itself.
    pub(crate) fn runs_all(&self) -> bool {
        self.0.info.supports_all
    }

    /// Whether it computes beside the program.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.0.info.asynchronous
    }

    pub(crate) fn orphans(&self) -> std::sync::MutexGuard<'_, Vec<kiln_ir::Id>> {
        self.0.orphans.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The device that `KILN_DEVICE` names, else the CPU. `KILN_RECORD=FILE` and `KILN_PROFILE=FILE` put a decorator
/// around it.
///
/// # Panics
/// If one of these variables names something that cannot be opened. [`Device::try_default`] gives an error instead.
impl Default for Device {
    #[track_caller]
    fn default() -> Device {
        // Not in a closure, which would panic at its own line instead of the caller's.
        match Device::try_default() {
            Ok(device) => device,
            Err(e) => panic!("the default device cannot be opened: {e}"),
        }
    }
}

impl Device {
    /// The default device, or why there is none: see its [`Default`].
    pub fn try_default() -> Result<Device, Error> {
        static DEFAULT: Mutex<Option<Device>> = Mutex::new(None);
        let mut default = DEFAULT.lock().unwrap_or_else(|e| e.into_inner());
        let (profile, record) = (kiln_env::PROFILE.read()?, kiln_env::RECORD.read()?);
        let decorated = profile.is_some() || record.is_some();
        if let Some(device) = &*default
            // The file of a decorator is not begun again.
            && (decorated || !device.has_ended())
        {
            return Ok(device.clone());
        }
        kiln_env::check()?;
        let named = kiln_env::DEVICE.read()?;
        let mut device = Device::open(named.as_deref().unwrap_or("cpu")).map_err(|error| match error {
            // Its options are not repeated.
            Error::Address { address, reason } if named.is_some() => {
                Error::Address { address: format!("KILN_DEVICE={address}"), reason }
            }
            error => error,
        })?;
        if let Some(path) = profile {
            device = device.profiled(Some(path))?.0;
        }
        if let Some(path) = record {
            device = device.recorded(path)?;
        }
        Ok(default.insert(device).clone())
    }
}

/// What computes for the device at an address, which also was spelled as `text`.
fn start(address: &str, text: &str) -> Result<Arc<dyn kiln_device::Driver>, Error> {
    Ok(match address {
        "reference" => Arc::new(kiln_cpu::Reference::start()),
        #[cfg(feature = "remote")]
        remote if kiln_remote::Address::is_remote(remote) => {
            Arc::new(kiln_remote::Remote::open(kiln_remote::Address::parse_all(text)?)?)
        }
        _ => {
            let _ = text;
            Arc::new(kiln_cpu::Cpu::start())
        }
    })
}

/// What can be opened.
#[cfg(feature = "remote")]
const KNOWN: &str =
    "known are cpu, cpu:N, reference, remote, kiln://HOST:PORT, kilns://, ws://, wss:// and unix:PATH";
#[cfg(not(feature = "remote"))]
const KNOWN: &str = "known are cpu, cpu:N and reference; this build has no remote devices";

/// The one spelling of an address.
fn canonical(address: &str) -> Result<String, Error> {
    #[cfg(feature = "remote")]
    if kiln_remote::Address::is_remote(address) {
        let servers = kiln_remote::Address::parse_all(address)?;
        return Ok(servers.iter().map(|a| a.to_string()).collect::<Vec<_>>().join(","));
    }
    let bad = |reason: &str| Error::Address { address: address.into(), reason: reason.into() };
    match address.trim().to_ascii_lowercase().as_str() {
        "reference" => Ok("reference".into()),
        "cpu" => Ok("cpu:0".into()),
        text => match text.strip_prefix("cpu:").map(str::parse::<u32>) {
            Some(Ok(n)) if n < CPUS => Ok(format!("cpu:{n}")),
            Some(_) => Err(bad("a CPU device has a number below 64")),
            None => Err(bad(KNOWN)),
        },
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.address)
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.address)
    }
}
