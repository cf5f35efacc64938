//! Handles to devices, and the list of those that this process has opened.

use crate::lane::{self, PlaceScope};
use crate::news::News;
use kiln_device::{DeviceInfo, Error, Locality, Memory, Pending, Place, Profile, Record};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

/// Names a device for the life of the process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// A place where tensors live and are computed. Cheap to clone; equal handles mean the same device.
#[derive(Clone)]
pub struct Device(Arc<Entry>);

struct Entry {
    id: DeviceId,
    address: String,
    driver: Arc<dyn kiln_device::Device>,
    eager: AtomicBool,
    /// It executes every operation itself.
    runs_all: bool,
    /// Frees that found no lane to travel in; the next submission takes them along.
    orphans: Mutex<Vec<kiln_ir::Id>>,
    /// Failures that nobody was told of yet.
    news: Mutex<News>,
}

static DEVICES: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// How many logical CPU devices one process can open.
const CPUS: u32 = 64;

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
    /// stand in for the first. The same address gives the same device.
    pub fn open(address: &str) -> Result<Device, Error> {
        let named = std::env::var("KILN_REMOTE_ADDRESS").ok().filter(|a| !a.is_empty());
        let text = match address.trim() {
            "remote" => named.as_deref().unwrap_or("kiln://127.0.0.1:7717"),
            address => address,
        };
        let address = canonical(text)?;
        let mut devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(device) = devices.iter().find(|d| d.0.address == address) {
            return Ok(device.clone());
        }
        let driver: Arc<dyn kiln_device::Device> = match address.as_str() {
            "reference" => Arc::new(kiln_cpu::Reference::start()),
            #[cfg(feature = "remote")]
            remote if kiln_remote::Address::is_remote(remote) => {
                Arc::new(kiln_remote::Remote::open(kiln_remote::Address::parse_all(text)?)?)
            }
            _ => Arc::new(kiln_cpu::Cpu::start()),
        };
        Ok(Device::add(&mut devices, address, driver))
    }

    /// The server that `KILN_REMOTE_ADDRESS` names, else the one on this machine.
    #[cfg(feature = "remote")]
    pub fn remote() -> Result<Device, Error> {
        Device::open("remote")
    }

    /// Makes a device of the user's own known under `address`, which must be new.
    pub fn wrap(address: &str, driver: Arc<dyn kiln_device::Device>) -> Result<Device, Error> {
        let mut devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner());
        if devices.iter().any(|d| d.0.address == address) || canonical(address).is_ok() {
            return Err(Error::Address { address: address.into(), reason: "it is taken".into() });
        }
        Ok(Device::add(&mut devices, address.into(), driver))
    }

    fn add(devices: &mut Vec<Device>, address: String, driver: Arc<dyn kiln_device::Device>) -> Device {
        let eager = AtomicBool::new(flag("KILN_EAGER"));
        let id = DeviceId(devices.len() as u32);
        let (runs_all, orphans, news) = (driver.supports_all(), Mutex::default(), Mutex::default());
        let device = Device(Arc::new(Entry { id, address, driver, eager, runs_all, orphans, news }));
        devices.push(device.clone());
        device
    }

    /// The same device with every submission written to a file that `kiln replay` runs again.
    pub fn recorded(&self, path: impl AsRef<std::path::Path>) -> Result<Device, Error> {
        let driver = Record::new(self.0.driver.clone(), path)?;
        Device::decorate(Arc::new(driver), &self.0.address)
    }

    /// The same device with every operation timed. The trace goes to `path` as it grows: it is
    /// whole however the program ends.
    pub fn profiled(&self, path: Option<std::path::PathBuf>) -> Result<(Device, Arc<Profile>), Error> {
        let profile = Arc::new(Profile::new(self.0.driver.clone(), path)?);
        Ok((Device::decorate(profile.clone(), &self.0.address)?, profile))
    }

    fn decorate(driver: Arc<dyn kiln_device::Device>, address: &str) -> Result<Device, Error> {
        let mut devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner());
        let kind = driver.info().name;
        let kind = kind.split('<').next().unwrap_or("").to_string();
        let address = format!("{kind}<{address}>#{}", devices.len());
        Ok(Device::add(&mut devices, address, driver))
    }

    /// The device with this id.
    pub fn by_id(id: DeviceId) -> Result<Device, Error> {
        let devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner());
        devices.get(id.0 as usize).cloned().ok_or(Error::UnknownDevice(id.0))
    }

    /// The local devices that can be opened, and every device that has been.
    pub fn list() -> Vec<Device> {
        let _ = (Device::open("cpu"), Device::open("reference"));
        DEVICES.lock().unwrap_or_else(|e| e.into_inner()).clone()
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
    /// moves that had to take the long way, steps that were skipped ([`crate::NonFinite::Skip`]).
    pub fn events(&self) -> Vec<String> {
        let mut events = self.0.driver.events();
        events.extend(self.skipped());
        events
    }

    /// Ends the session with a server, which frees everything there at once instead of at the end of its lease. What
    /// is asked of the device afterwards fails with [`Error::Stopped`]. Local devices stay as they are.
    pub fn close(&self) {
        self.0.driver.close();
    }

    /// Closes all devices that this process has opened: for the end of a program.
    pub fn close_all() {
        let devices = DEVICES.lock().unwrap_or_else(|e| e.into_inner()).clone();
        devices.iter().for_each(Device::close);
    }

    /// The device below the handle.
    pub fn driver(&self) -> &Arc<dyn kiln_device::Device> {
        &self.0.driver
    }

    /// Where it computes.
    pub fn locality(&self) -> Locality {
        self.0.driver.locality()
    }

    /// Whether it may have a short way to others of its kind.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self.locality(), Locality::Server(_))
    }

    pub(crate) fn unread(&self) -> &Mutex<News> {
        &self.0.news
    }

    pub(crate) fn is_eager(&self) -> bool {
        self.0.eager.load(Ordering::Relaxed)
    }

    /// Whether it executes every operation itself.
    pub(crate) fn runs_all(&self) -> bool {
        self.0.runs_all
    }

    pub(crate) fn orphans(&self) -> std::sync::MutexGuard<'_, Vec<kiln_ir::Id>> {
        self.0.orphans.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The device that `KILN_DEVICE` names, else the CPU. `KILN_RECORD=FILE` and `KILN_PROFILE=FILE` put a decorator
/// around it.
///
/// # Panics
/// If one of these variables names something that cannot be opened.
impl Default for Device {
    fn default() -> Device {
        static DEFAULT: LazyLock<Device> = LazyLock::new(|| {
            let text = |name: &str| std::env::var(name).ok().filter(|s| !s.is_empty());
            let open = || -> Result<Device, Error> {
                let mut device = Device::open(text("KILN_DEVICE").as_deref().unwrap_or("cpu"))?;
                if let Some(path) = text("KILN_PROFILE") {
                    device = device.profiled(Some(path.into()))?.0;
                }
                if let Some(path) = text("KILN_RECORD") {
                    device = device.recorded(path)?;
                }
                Ok(device)
            };
            open().unwrap_or_else(|e| panic!("the default device cannot be opened: {e}"))
        });
        DEFAULT.clone()
    }
}

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
            None => Err(bad("known are `cpu`, `cpu:N` and `reference`")),
        },
    }
}

pub(crate) fn flag(name: &str) -> bool {
    std::env::var(name).is_ok_and(|v| !v.is_empty() && v != "0")
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        self.0.id == other.0.id
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
